"""The numbers of `ProcessGroup.stats` for others to read: Prometheus and OpenTelemetry."""
