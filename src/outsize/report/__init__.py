"""Everything a person sees: tables, plots, HTML pages, traces and the texts of errors. No torch here.

To read it, start at `tables.plan_tables` (the terminal) or `html.page` (the report). It words what others
found and decides nothing.
"""
