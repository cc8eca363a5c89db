"""Roles: which parameter, or rows of a fused one, is the query, key or value of which head."""
