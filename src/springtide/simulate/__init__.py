"""A simulated cluster that obeys the same scheduling policies as a live run."""
