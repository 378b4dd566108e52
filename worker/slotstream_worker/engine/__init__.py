"""The engine: models, rows, launches, rounds. No Redis in here."""
