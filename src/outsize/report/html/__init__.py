"""Builds the report of a plan or a run as one HTML file that needs no network and no script.

Main entry: `page.render`; figures are SVG trees from `svg`.
"""
