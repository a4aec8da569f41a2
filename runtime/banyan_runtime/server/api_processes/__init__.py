"""API processes: several processes answer HTTP on one listening socket, as one server."""
