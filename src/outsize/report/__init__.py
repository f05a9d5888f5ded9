"""Everything a person sees: tables, plots, HTML, traces. No torch here."""
