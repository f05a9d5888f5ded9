"""Tells a reader of a plan or of a measured step about bottlenecks, idle devices, and possible gains. The
main entry is `overview.outlook`. Advice never changes a plan.
"""
