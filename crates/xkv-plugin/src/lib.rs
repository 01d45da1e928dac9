//! Connector logic: tasks, deadlines, scheduling, copy and checksum, statistics; knows no Python.
