"""test_otlp.py with the official exporter: `make test-with-otlp`."""

import pytest
import with_package


@pytest.mark.skipif(
  not with_package.has('opentelemetry.exporter.otlp.proto.http'),
  reason='`make test-with-otlp` installs the exporter',
)
def test_the_official_exporter_sends_what_a_run_records():
  line = with_package.run_tests('tests/contrib/opentelemetry/test_otlp.py')
  assert 'passed' in line and 'skipped' not in line
