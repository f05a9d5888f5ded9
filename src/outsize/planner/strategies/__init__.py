"""Makes candidates fit or run faster: recompute, offload to the host, parallel branches. Each strategy takes
what the search has found and offers candidates that are priced in the same way.
"""
