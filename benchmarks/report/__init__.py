"""The report: docs/report.md and docs/report.html, from docs/results alone."""
