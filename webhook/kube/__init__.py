"""The API server: requests, watches, leases, Events, and the forms of our objects."""
