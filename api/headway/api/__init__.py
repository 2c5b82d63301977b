"""The HTTP API: routes of about ten lines, schemas, server-sent events."""
