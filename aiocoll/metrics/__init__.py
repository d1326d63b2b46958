"""Exporters of `ProcessGroup.stats`: Prometheus and OpenTelemetry."""
