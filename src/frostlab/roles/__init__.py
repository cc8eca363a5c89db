"""Roles of parameters, and of the rows of fused parameters: query, key, value, norm, head, …"""
