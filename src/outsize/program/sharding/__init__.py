"""Answers: what does a rank run that has a part of a program's values, or of its weights?

Start with `rank_step`, which says what an axis makes of one instruction, and `propagate`, whose rules follow
a divided dim from one instruction to the next. Each axis has a folder: where its divided values begin, its
own rules, and the tape of one rank with collectives between the instructions. It never runs anything, and
knows no model by its name.
"""
