"""Runs described elsewhere, tried here: read a case, shrink it, point it at local files, launch it.

for case in read_cases("cases.jsonl"):
    small = shrink(case)
    outcome = launch(localise(small, files), ...)
"""
