"""The Grafana boards as code: what each panel asks and says (pure), and what writes them as JSON.

Nothing here runs while Baton serves. ``make dashboards`` writes the JSON in
``deploy/observability/dashboards``, and a test compares what is committed there with what this code
makes. Only ``grafana.py`` needs grafana-foundation-sdk, which is installed for development alone.
"""
