"""Text, tables, plots and HTML of all results."""
