#!/usr/bin/env bash
# sqlite-vec 0.1.9: ALTER TABLE ... RENAME of a vec0 table succeeds, and no query of the table works afterwards.
#
# SQLite renames the virtual table only. The tables with its rows keep their old names (docs_chunks, docs_rowids, ...),
# and vec0 looks for them under the new one. Renaming it back repairs the table. To give new vectors the name of old ones
# in one transaction, drop the table and create it again: both are undone by a rollback.
#
# Output of version 0.1.9 (apsw 3.50.4.0):
#   before: [(1,)]
#   renamed: no error
#   after: SQLError: Error preparing stmtChunk: no such table: main.old_chunks
#   renamed back: [(1,)]
#   dropped, created and rolled back: [(1,)]
#
# Exits with 1 if the renamed table can be searched, or the rename is refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder"  # so that nothing is left behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet sqlite-vec==0.1.9 apsw==3.50.4.0
"$folder/venv/bin/python" - <<'PYTHON'
import struct
import sys

import apsw
import sqlite_vec

db = apsw.Connection(":memory:")
db.enable_load_extension(True)
db.load_extension(sqlite_vec.loadable_path())
first, second = (struct.pack("2f", *vector) for vector in ((1, 0), (0, 1)))


def nearest(table):
    query = f"SELECT rowid FROM {table} WHERE embedding MATCH ? AND k = 1"
    return db.execute(query, (first,)).fetchall()


db.execute("CREATE VIRTUAL TABLE docs USING vec0(embedding float[2])")
db.execute("INSERT INTO docs(rowid, embedding) VALUES (1, ?), (2, ?)", (first, second))
print("before:", nearest("docs"))
db.execute("ALTER TABLE docs RENAME TO old")
print("renamed: no error")
try:
    nearest("old")
    broken = False
except apsw.Error as error:
    print(f"after: {type(error).__name__}: {error}")
    broken = "no such table" in str(error)
db.execute("ALTER TABLE old RENAME TO docs")
print("renamed back:", nearest("docs"))
db.execute("BEGIN IMMEDIATE")
db.execute("DROP TABLE docs")
db.execute("CREATE VIRTUAL TABLE docs USING vec0(embedding float[3])")
db.execute("ROLLBACK")
print("dropped, created and rolled back:", nearest("docs"))
sys.exit(0 if broken else 1)
PYTHON
