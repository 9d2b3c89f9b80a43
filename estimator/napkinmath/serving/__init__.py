"""The local page: a static front end over a small typed HTTP API, on the standard library's server.

No framework: the light install has to serve it offline, the API has three routes, and everything
the page shows is already in the estimate's own JSON.
"""
