"""The low-IR interpreter: functions become Python closures over numpy values, then run."""
