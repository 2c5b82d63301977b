"""The nouns of the wire and the one module that speaks to Redis; nothing that one side alone needs."""
