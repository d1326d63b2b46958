"""The fixture `redis`: one Redis server for all tests that do not change its configuration."""

from ..redis_server import redis as redis
