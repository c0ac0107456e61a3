"""Prints the records that tests/train/metrics_test.cpp compares with, as TensorBoard's own writer makes them.

    pip install tensorboard; python python/make_event_fixture.py
"""
import io

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter


class Sink(io.BytesIO):
    def flush(self):
        pass


def record(event):
    sink = Sink()
    writer = RecordWriter(sink)
    writer.write(event.SerializeToString())
    return sink.getvalue().hex()


def main():
    values = [summary_pb2.Summary.Value(tag="loss", simple_value=2.5),
              summary_pb2.Summary.Value(tag="max_vio/max", simple_value=0.125)]
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    print("version", record(event_pb2.Event(wall_time=1700000000.5, file_version="brain.Event:2")))
    print("start", record(event_pb2.Event(wall_time=1700000000.5, step=300, session_log=log)))
    print("scalars", record(event_pb2.Event(wall_time=1700000001.25, step=300, summary=summary_pb2.Summary(value=values))))


if __name__ == "__main__":
    main()
