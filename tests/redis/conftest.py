"""A Redis server for all tests that leave it as it is."""

from ..redis_server import redis as redis
