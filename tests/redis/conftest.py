"""Fixture of a Redis server shared by all tests that do not change its configuration."""

from ..redis_server import redis as redis
