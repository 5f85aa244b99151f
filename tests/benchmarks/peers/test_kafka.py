"""What a Kafka is told before it starts."""

from pathlib import Path

from benchmarks.peers.kafka_server import settings


def test_a_kafka_has_one_copy_of_its_own_topics_and_makes_none_without_being_asked(tmp_path: Path) -> None:
    found = settings(tmp_path, 19092, 19093)
    assert found["listeners"] == "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093"
    assert found["controller.quorum.voters"] == "1@127.0.0.1:19093"
    assert found["auto.create.topics.enable"] == "false", "such a topic would not be synced"
    assert found["log.dirs"].startswith(str(tmp_path))
