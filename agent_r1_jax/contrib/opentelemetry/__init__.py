"""Spans and metrics of a run for OpenTelemetry."""
