"""The web app: routes, SSE, security, the page."""
