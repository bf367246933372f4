"""What is written by code in ``helm/baton``: the schema of the values, the README, copied files.

``values.yaml`` says which keys there are, their defaults, and by its comments what each is;
``rules.py`` what else a value may be; the dataclasses what stands under ``config:``.
"""
