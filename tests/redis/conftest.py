"""The fixture of a Redis server that is shared by all tests which do not change its configuration."""

from ..redis_server import redis as redis
