"""What everything else stands on: errors, types, storage, threads, memory, compiled code, small
matrices, labels.
"""
