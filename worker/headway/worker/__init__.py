"""The worker: claim, schedule, admit, run, publish, drain."""
