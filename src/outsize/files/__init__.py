"""Answers how files are written so that a kill, a full disk or a power cut loses nothing, and how they are
read when strangers wrote them.

To read it, start at `file_system.FileSystem`, then `replace.replace_text` (one file, the old or the new one)
and `sealed_json` (JSON with a checksum). It knows no noun of the package and never imports torch.
"""
