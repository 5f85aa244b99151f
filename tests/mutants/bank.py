"""The defects, by the numbers of the catalogue (docs/design/defects.md). One id is one defect.

M05b is a relative of M05. M33 and those above it are ours: the protocol simulation, and attacks, found them; those
from M50 on are of security.

`fells` says what is expected to fall: invariants by their numbers,
"assert" a core's own check, or the directed test. What fell is printed; that it is another one is no failure.

| tier | what runs |
|---|---|
| protocol | seeds of tests/simulation/protocol |
| cluster | seeds of the whole-cluster simulation, of the kind named by `target` |
| crashes | the crash enumeration of the store, with the mutant of that name (tests/crashes/mutants.py) |
| directed | the named tests: where seeds cannot reach it, or would need too many; `why` says so |
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.crashes.mutants import MUTANTS as ON_DISK
from tests.mutants import (
    bookies,
    brokers,
    clients,
    coordinators,
    halves,
    indexes,
    inside,
    lateness,
    ledgers,
    metadata,
    pending,
    rebuilding,
    security,
    subscriptions,
    transactions,
    wires,
)
from tests.mutants.ledgers import Plant
from tests.simulation.tiers import INSIDE, SECURED, TRANSACTIONS

PROTOCOL, CLUSTER, CRASHES, DIRECTED = "protocol", "cluster", "crashes", "directed"

_PATIENCE = "tests/runtime/tcp/test_patience.py"
_PEERS = "tests/runtime/peer/test_peers.py"
_PENDING = "tests/broker/subscription/core/test_pending_acks.py"
_FAIR = "tests/broker/subscription/core/test_fair_shared.py"
_REBALANCE = "tests/bookie/maintenance/test_rebalance.py"
_SURPLUS = "tests/bookie/maintenance/test_surplus.py"
_DISKS = "tests/bookie/test_several_disks.py"
_SERVICE, _CHECKPOINT = "tests/bookie/test_service.py", "tests/bookie/store/test_checkpoint.py"
_BALANCE = "tests/balance/"
_LIAR = (
    f"{_BALANCE}test_attacks.py"
    "::test_a_broker_that_lies_neither_gets_everything_nor_keeps_the_others_from_their_balance"
)
_SPLIT = (
    "tests/broker/cluster/test_split.py"
    "::test_no_topic_has_two_owners_while_its_namespace_is_split_however_calls_interleave"
)
_WAITS = f"{_SERVICE}::test_every_answer_to_a_fence_waits_for_its_sync_also_a_negative_one"
_POWER = f"{_SERVICE}::test_answered_fence_holds_wherever_the_power_fails"
_AFTER = f"{_SERVICE}::test_after_a_fence_only_recovery_adds_are_taken_also_after_restarts"
_TOPIC_LOG = "tests/broker/log/test_topic_log.py"
_IDLE = f"{_CHECKPOINT}::test_fence_of_an_idle_ledger_survives_checkpoint_and_power_loss"
FENCE: dict[str, tuple[str, ...]] = {
    "M07": (_WAITS, _POWER, _AFTER, _IDLE), "M07c": (_WAITS, _POWER, _AFTER), "M08": (_WAITS, _POWER),
    "M08b": (_WAITS, _POWER, _AFTER),
}  # fmt: skip
"""The tests that fall with a fence that is not durable, beside what its tier runs."""

NO_COUNTERPART: dict[str, str] = {}
"""Numbers without a plant, and why."""


@dataclass(frozen=True, slots=True)
class Mutant:
    id: str  # "M05b"
    what: str
    tier: str
    plant: Plant
    fells: str = ""
    target: str = ""  # what of the tier runs
    why: str = ""  # this tier and not seeds

    @property
    def number(self) -> str:
        return self.id[:3]


def _of(id_: str, plant: Plant, tier: str, fells: str, target: str = "", why: str = "") -> Mutant:
    what = (plant.__doc__ or "").partition(": ")[2] or target.partition(" ")[2]
    return Mutant(id_, what, tier, plant, fells, target, why)


def _all() -> Iterator[Mutant]:
    yield from _cores()
    yield from _store()
    yield from _processes()
    yield from _of_security()
    yield from _of_owners()
    yield from _of_lateness()
    yield from _of_topics()
    yield from _of_coordinators()
    yield from _within_a_process()
    yield from _of_wires()
    yield from _passed_over()
    yield from _of_moves()
    yield from _of_indexes()
    yield from _of_etcd()
    yield from _of_rebuilding()


def _of_rebuilding() -> Iterator[Mutant]:
    core, rebuilt = "tests/metadata/test_rebuild_core.py", "tests/bookie/maintenance/test_rebuilt_metadata.py"
    for id_, plant, target in (
        ("M26h", rebuilding.label_is_stored_later,
         "tests/bookie/maintenance/test_labels.py::test_a_label_is_durable_before_the_first_add_is_answered"),
        ("M26i", rebuilding.away_has_no_slot,
         f"{core}::test_bookies_that_were_not_read_and_missing_copies_are_told"),
        ("M26j", rebuilding.ensemble_of_the_most,
         f"{core}::test_each_entry_that_is_left_has_its_holders_in_its_write_set"),
        ("M26k", rebuilding.tombstones_are_not_asked,
         f"{core}::test_a_deleted_ledger_stays_out_if_one_bookie_knows_of_it_and_comes_back_if_none_does"),
        ("M26l", rebuilding.rebuilt_for_ever,
         f"{rebuilt}::test_an_empty_metadata_starts_no_bookie_and_the_rebuilt_one_starts_it_without_limbo"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, "no seed loses all metadata")


def _of_etcd() -> Iterator[Mutant]:
    store, core = "tests/metadata/test_etcd.py", "tests/metadata/test_etcd_core.py"
    compacted = f"{core}::test_a_watch_from_before_a_compaction_is_told_and_one_from_it_misses_nothing"
    for id_, plant, target in (
        ("M26c", metadata.unanswered_is_refused,
         f"{store}::test_a_commit_whose_answer_is_lost_is_unknown_and_decided_by_content"),
        ("M26d", metadata.commit_outlives_its_session,
         f"{store}::test_a_session_whose_lease_etcd_has_ended_is_lost_and_writes_nothing"),
        ("M26e", metadata.compaction_is_passed_over, compacted),
        ("M26f", metadata.watch_begins_after_what_was_seen, compacted),
        ("M26g", metadata.full_is_refused, f"{store}::test_the_commit_that_fills_etcd_is_unknown"),
        ("M26m", metadata.reads_are_serializable,
         "tests/metadata/test_etcd_cluster.py"
         "::test_a_client_of_a_server_that_is_cut_off_reads_nothing_old_and_keeps_its_session"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, "seeds have no etcd")


def _of_indexes() -> Iterator[Mutant]:
    built, core = "tests/broker/log/test_key_indexes.py", "tests/broker/log/test_key_index_core.py"
    unread = "tests/broker/subscription/test_unread.py"
    for id_, plant, target in (
        ("M06b", indexes.damaged_index_is_believed,
         f"{core}::test_damage_another_ledger_and_a_later_version_are_noticed"),
        ("M06c", indexes.unparsed_entry_has_nothing,
         f"{core}::test_a_block_without_a_candidate_has_no_message_that_a_search_finds"),
        ("M06d", indexes.hash_proves_a_value,
         "tests/proto/test_summary.py::test_what_a_filter_wants_may_match_whatever_the_hashes_are"),
        ("M06e", indexes.summary_knows_tombstones,
         f"{unread}::test_who_reads_compacted_gets_tombstones_that_the_index_and_the_summary_exclude"),
        ("M06f", indexes.index_knows_each_chunk,
         f"{unread}::test_a_chunk_is_not_excluded_by_a_publish_time_that_only_the_first_one_has"),
        ("M06g", indexes.unread_is_not_stable,
         f"{unread}::test_while_a_transaction_is_open_nothing_of_it_or_after_it_is_passed_over"),
        ("M06h", indexes.run_is_an_entry_too_long,
         f"{unread}::test_what_is_wanted_comes_whatever_is_in_a_topic"),
        ("M06i", indexes.first_property_counts,
         "tests/proto/test_entry_filter.py::test_properties_that_are_read_without_protobuf_are_those_that_it_reads"),
        ("M06j", indexes.each_judge_leaves_a_rest,
         "tests/broker/subscription/test_expiry.py::"
         "test_a_batch_of_which_each_message_is_expired_or_unwanted_is_not_shown_whole"),
        ("M06k", indexes.deleted_schedule_is_new,
         "tests/broker/session/test_schedules.py::"
         "test_a_broker_that_does_not_know_yet_that_a_schedule_is_gone_fires_nothing_again"),
        ("M29b", indexes.index_outlives_its_ledger,
         f"{built}::test_an_index_goes_with_its_ledger_and_a_topic_made_anew_has_nothing_of_the_old_one"),
        ("M29c", indexes.index_is_named_when_it_begins,
         f"{built}::test_a_crash_at_any_step_leaves_no_index_or_a_whole_one"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, "seeds search nothing")


def _cores() -> Iterator[Mutant]:
    for id_, plant, fells in (
        ("M01", ledgers.reads_without_fence, "11"),
        ("M02", ledgers.lower_bound_forgets_fragments, "assert"),
        ("M03", ledgers.ensembles_persisted_early, "4"),
        ("M04", ledgers.reads_from_changed_ensemble, "11"),
        ("M05", ledgers.one_miss_too_few, "11"),
        ("M05b", ledgers.silence_is_a_vote, "11"),
        ("M10", ledgers.acks_during_a_change, "9"),
        ("M11", ledgers.drain_inside_the_loop, "5"),
        ("M12", ledgers.change_in_memory_only, "5"),
        ("M13", ledgers.change_of_old_and_new, "assert 13"),
        ("M18", ledgers.close_at_lap, "7"),
        ("M18b", ledgers.acks_out_of_order, "8"),
        ("M19", ledgers.coverage_over_the_ensemble, "11"),
        ("M19b", ledgers.coverage_needs_everybody, "13"),
        ("M21", ledgers.last_fragment_of_an_open_ledger, "7"),
        ("M22", ledgers.lac_is_the_end, "6"),
        ("M33", ledgers.write_back_tells_its_own_lac, "6"),
    ):
        yield _of(id_, plant, PROTOCOL, fells)


_BREAKS = {
    "M07": "16", "M07b": "16", "M07c": "15 16", "M08b": "15", "M09b": "17", "M14": "16", "M17": "22", "M23c": "19",
    "M24": "21", "M35": "21", "M47": "17",
}  # fmt: skip
"""Invariants that defects of order break beside 18, what was acknowledged is there."""


def _store() -> Iterator[Mutant]:
    for name in sorted(ON_DISK):
        id_ = name.partition(" ")[0]
        yield _of(id_, ON_DISK[name], CRASHES, _BREAKS.get(id_, "18"), name)


def _processes() -> Iterator[Mutant]:
    for id_, plant, tier, fells, target, why in (
        ("M06", bookies.damage_is_no_entry, DIRECTED, "17", "tests/bookie/store/test_corruption.py",
         "each byte of a store is damaged in turn there; a seed damages a few"),
        ("M45", ledgers.write_back_counts_when_sent, CLUSTER, "7", "ledgers", ""),
        ("M46", brokers.snapshot_is_believed, CLUSTER, "doubled", "take-over", ""),
        ("M44", ledgers.unknown_change_is_none, CLUSTER, "5", "ledgers", ""),
        ("M44b", ledgers.late_answer_counts_in_the_next_ledger, DIRECTED, "5",
         "tests/ledger/test_listener.py::test_an_entry_that_went_on_to_another_ledger_hears_nothing_of_the_first",
         "an answer has to be late by the whole time of a roll-over"),
        ("M44c", ledgers.leaves_after_its_ledger_ended, DIRECTED, "5",
         "tests/ledger/test_listener.py::"
         "test_what_has_not_left_when_its_ledger_ended_leaves_with_the_next_ledger_alone",
         "a roll-over takes more than a turn of the loop today"),
        ("M08", bookies.negative_answer_before_the_fence_is_synced, CLUSTER, "15", "ledgers", ""),
        ("M07d", bookies.limbo_without_fences, DIRECTED, "16", "tests/bookie/maintenance/test_limbo.py",
         "needs a bookie that lost data"),
        ("M09", bookies.amnesia, DIRECTED, "17 4",
         "tests/bookie/maintenance/test_limbo.py", "needs a bookie that lost data"),
        ("M16", bookies.whoever_is_at_the_address, DIRECTED, "25",
         "tests/runtime/peer/test_peers.py tests/runtime/sim/test_sim_network.py", "needs a bookie that was replaced"),
        ("M20", bookies.copies_without_recovery_flag, DIRECTED, "21", "tests/bookie/maintenance/test_limbo.py",
         "needs a bookie that lost data"),
        ("M25", bookies.log_forgets_a_ledger, DIRECTED, "21", "tests/bookie/maintenance/test_garbage.py",
         "seeds delete no ledgers under a collector"),
        ("M41", clients.wake_up_dies_with_its_waiter, DIRECTED, "38", "tests/client/blocking/test_waking.py",
         "clients of a cluster's seeds are not cancelled while they receive"),
        ("M26", bookies.listing_is_believed, DIRECTED, "22", "tests/bookie/maintenance/test_garbage.py",
         "seeds delete no ledgers under a collector"),
        ("M26b", bookies.absence_is_proof, DIRECTED, "22",
         "tests/bookie/maintenance/test_garbage_doubt.py tests/broker/cluster/test_orphans.py",
         "no seed damages a path of the metadata"),
        ("M27", bookies.empty_disk_is_healthy, DIRECTED, "25",
         "tests/bookie/test_identity.py tests/bookie/maintenance/test_limbo.py",
         "needs a bookie that lost data"),
        ("M27b", bookies.journal_is_not_noted, DIRECTED, "25", "tests/bookie/test_journal_notes.py",
         "seeds roll a disk back, and few of them while entries depend on it"),
        ("M27c", bookies.added_disk_moves_ledgers, DIRECTED, "17",
         f"{_DISKS}::test_a_directory_that_is_added_takes_new_ledgers_and_moves_none", "seeds have one disk a bookie"),
        ("M27d", bookies.failed_disk_is_written_on, DIRECTED, "18",
         f"{_DISKS}::test_nothing_of_a_directory_changes_after_its_first_failed_sync", "as M27c"),
        ("M27e", bookies.failed_disk_takes_adds, DIRECTED, "15",
         f"{_DISKS}::test_a_failing_disk_takes_its_ledgers_and_not_the_bookie", "as M27c"),
        ("M27f", bookies.drops_without_a_second_look, DIRECTED, "21",
         f"{_SURPLUS}::test_a_worker_that_comes_before_nothing_is_held_keeps_the_copies",
         "seeds move no copies off a living bookie"),
        ("M27g", bookies.dropping_is_not_recorded, DIRECTED, "17",
         f"{_SURPLUS}::test_a_bookie_that_dropped_copies_is_no_vote_keeps_the_fence_and_takes_them_again", "as M27f"),
        ("M27h", bookies.moves_that_help_nothing, DIRECTED, "",
         f"{_REBALANCE}::test_the_spread_falls_with_each_move_no_two_undo_each_other_and_all_that_must_hold_holds",
         "as M27f"),
        ("M27i", bookies.moves_to_the_same_rack, DIRECTED, "",
         f"{_REBALANCE}::test_what_must_not_move_stays", "as M27f"),
        ("M27j", bookies.stopped_moves_are_not_counted, DIRECTED, "",
         f"{_REBALANCE}::test_a_rebalancing_is_stopped_and_the_same_order_goes_on_where_it_was", "as M27f"),
        ("M28", brokers.sequence_at_push, DIRECTED, "32",
         "tests/broker/topic/test_dedup.py tests/broker/topic/test_producer.py",
         "420 seeds of a cluster did not meet it: a resend has to overtake a write that then fails"),
        ("M29", brokers.deleted_before_the_list, DIRECTED, "34",
         "tests/broker/log/test_topic_log.py::test_trimming_changes_the_list_first_and_deletes_nothing_when_that_fails",
         "needs a trim and a metadata error at the same moment"),
        ("M29d", brokers.idle_ledger_is_listed_as_open, DIRECTED, "",
         f"{_TOPIC_LOG}::test_an_idle_ledger_ends_without_a_next_one_and_a_crash_then_leaves_nothing_to_recover",
         "the next owner recovers it: slower, and nothing is lost"),
        ("M29e", brokers.publish_does_not_follow_an_idle_ledger, DIRECTED, "",
         f"{_TOPIC_LOG}::test_a_publish_while_an_idle_ledger_ends_is_stored_in_the_next_one",
         "no seed is idle for so long"),
        ("M29f", brokers.idle_cursor_ledger_stays_open, DIRECTED, "",
         "tests/broker/subscription/test_cursors.py::"
         "test_an_idle_cursor_ledger_ends_and_the_next_owner_finds_its_state", "as M29d"),
        ("M30", brokers.serves_on_after_another_owner, DIRECTED, "27",
         "tests/broker/log/test_topic_log.py",
         "needs an owner that goes on after it was replaced, and a roll-over by it"),
        ("M30b", brokers.ends_although_it_is_lost, DIRECTED, "28",
         "tests/broker/log/test_topic_log.py::test_a_topic_that_is_lost_while_it_ends_stays_lost",
         "one seed of 18,000 met it: an append has to fail between the end of one switch and the end of the topic"),
        ("M32", brokers.key_moves_with_its_owner, DIRECTED, "42",
         "tests/broker/subscription/core/test_dispatch_walk.py",
         "the walk of the dispatcher alone makes more joins and leaves in a second than seeds of a cluster in an hour"),
        ("M32b", subscriptions.given_back_is_in_flight, DIRECTED, "",
         "tests/broker/subscription/core/test_dispatch_walk.py", "as M32"),
        ("M32c", subscriptions.idle_time_saves_turns, DIRECTED, "",
         f"{_FAIR}::test_a_key_that_comes_back_is_owed_nothing_for_the_time_it_was_idle", "a core alone"),
        ("M32d", subscriptions.what_waits_goes_before_what_is_unread, DIRECTED, "",
         f"{_FAIR}::test_a_key_with_one_message_goes_next_however_many_of_another_key_are_before_it", "a core alone"),
        ("M32e", subscriptions.idle_key_forgets_its_rate, DIRECTED, "",
         f"{_FAIR}::test_what_a_key_used_of_its_rate_counts_after_it_was_acknowledged_and_after_a_seek",
         "a core alone"),
        ("M31", brokers.failed_but_still_queued, DIRECTED, "31",
         "tests/broker/log/test_log_queue.py", "a lost topic sends nothing any more"),
        ("M34", bookies.lost_everywhere_is_whole, DIRECTED, "17", "tests/bookie/maintenance/test_entry_repairer.py",
         "needs an entry that all bookies lost"),
        ("M43", clients.dropped_and_not_closed, DIRECTED, "",
         "tests/client/blocking/test_leaving.py::test_a_consumer_that_is_dropped_takes_no_more_messages",
         "clients of the simulation drop nothing"),
        ("M34b", bookies.found_nowhere_is_whole, DIRECTED, "17", "tests/bookie/maintenance/test_limbo.py",
         "needs a bookie that lost the only copy"),
        ("M39", brokers.seek_answered_after_its_messages, DIRECTED, "the answer comes first",
         "tests/broker/subscription/test_seek.py", "seeds of a cluster make no seeks"),
        ("M40", brokers.redelivery_is_free, DIRECTED, "43",
         "tests/broker/subscription/core/test_dispatch_walk.py tests/client/core/test_permits.py",
         "the walks of both sides count permits; a seed of a cluster grants so many that it does not matter"),
        ("M42", clients.refusal_of_one_settles_its_namesakes, DIRECTED, "",
         "tests/client/test_as_pulsar.py::test_a_refusal_of_one_of_two_messages_with_one_id_is_not_that_of_the_other",
         "programs of the seeds name no sequence id twice"),
        ("M43b", clients.sent_after_the_commit, DIRECTED, "",
         "tests/client/core/test_transaction.py::test_threads_that_send_while_it_ends_are_in_it_or_are_refused",
         "programs of the seeds send from one thread"),
    ):  # fmt: skip
        yield _of(id_, plant, tier, fells, target, why)


_GRANTS, _MEMBERS = "tests/broker/access/test_grants.py", "tests/metadata/test_members.py"
_TABLE, _WHO = "tests/broker/access/test_table.py", "tests/security/test_settings.py"
_SECURED = "tests/simulation/test_secured.py"
_STRANGERS = f"{_SECURED}::test_a_stranger_with_keys_is_answered_by_no_bookie"
_STALE = f"{_GRANTS}::test_a_watch_that_stays_broken_denies_after_a_while_and_what_changed_meanwhile_is_read"


def _of_owners() -> Iterator[Mutant]:
    for id_, plant in (
        ("M63", security.anybody_writes), ("M63b", security.anybody_ends), ("M63c", security.names_of_all),
        ("M63d", security.anybody_decides), ("M63e", security.anybody_settles),
    ):  # fmt: skip
        yield _of(id_, plant, CLUSTER, "60", SECURED)


def _of_lateness() -> Iterator[Mutant]:
    late, names = "tests/broker/node/test_late_deletion.py::", "tests/simulation/test_names.py"
    rare = "it has to be late by a session and more: the seeds that are tried pause its broker there"
    step = "between two steps of a deletion no seed pauses a broker"
    for id_, plant, target, why in (
        ("M64", lateness.topic_of_any_life, names, rare),
        ("M64b", lateness.subscription_of_any_owner, names, rare),
        ("M64c", lateness.partitioned_of_any_life,
         f"{late}test_a_partitioned_topic_that_was_made_anew_meanwhile_stays_with_all_that_is_its",
         "the topics of a seed have no partitions"),
        ("M64d", lateness.schemas_and_grants_by_name,
         f"{late}test_what_was_taken_over_after_the_last_look_keeps_its_schemas_and_grants", step),
        ("M64e", lateness.cursor_claimed_by_any_owner,
         f"{late}test_an_owner_that_stood_still_takes_no_subscription_from_the_next_one",
         "it has to stand still between the claims of its topic and of its cursors"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, why)


def _of_topics() -> Iterator[Mutant]:
    on, core = "tests/broker/topic/test_transactions.py::", "tests/broker/topic/test_transactions_core.py::"
    crash = "test_numbers_of_a_commit_count_and_those_of_an_abort_are_new_again"
    for id_, plant, fells, target in (
        ("M80", transactions.join_is_skipped, "74", f"{on}test_a_refused_send_is_never_in_the_log"),
        ("M81", transactions.settled_before_it_is_stored, "85",
         f"{on}test_a_settlement_is_answered_when_it_is_stored_and_twice_is_once"),
        ("M82", transactions.aborted_by_id, "69", f"{core}test_a_late_send_never_hides_committed_entries"),
        ("M83", transactions.outcomes_ahead_of_their_position, "68",
         f"{on}test_an_entry_after_the_stored_outcomes_is_found_again"),
        ("M84", transactions.numbers_at_append, "84", f"{on}{crash}"),
        ("M85", transactions.snapshot_after_an_open_transaction, "83", f"{on}{crash}"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, fells, target, "seeds with transactions are slow: a test of its own is enough")


def _of_coordinators() -> Iterator[Mutant]:
    folder = "tests/broker/transaction/"
    walk, sinks = f"{folder}test_coordinator_walk.py::", f"{folder}test_names_and_sinks.py::"
    half = f"{folder}test_halves.py::"
    for id_, plant, fells, target in (
        ("M90", coordinators.answered_while_in_doubt, "65",
         f"{walk}test_a_commit_in_doubt_is_not_answered_and_the_next_epoch_knows"),
        ("M91", coordinators.done_before_all_stored, "85", f"{walk}test_a_random_history_keeps_the_rules"),
        ("M92", coordinators.epoch_stays, "61", f"{folder}test_log.py::test_two_owners_at_once_have_different_epochs"),
        ("M93", coordinators.handed_to_any_epoch, "93", f"{walk}test_a_random_history_keeps_the_rules"),
        ("M94", coordinators.forgotten_by_age, "86", f"{walk}test_a_random_history_keeps_the_rules"),
        ("M95", coordinators.batch_is_not_remembered, "89",
         f"{sinks}test_each_batch_of_a_sink_is_committed_once_and_its_other_attempts_are_aborted"),
        ("M96", coordinators.settled_before_durable, "63", f"{walk}test_a_random_history_keeps_the_rules"),
        ("M97", coordinators.aborted_by_sink_alone, "89",
         f"{sinks}test_the_commit_of_a_batch_ends_what_was_begun_for_it_and_nothing_of_a_later_one"),
        ("M98", halves.decided_apart, "96",
         f"{half}test_a_commit_shows_the_half_once_in_every_topic_and_is_answered_when_it_is_durable"),
        ("M98b", halves.any_unknown_counts, "98", f"{half}test_an_unknown_counts_once_however_often_and_late_it_comes"),
        ("M98c", halves.failures_count, "98",
         f"{half}test_a_silent_half_is_asked_about_after_its_time_and_then_with_pauses_that_double"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, fells, target, "seeds with transactions are slow: a test of its own is enough")
    yield _of("M98d", halves.dropped_when_unknown, CLUSTER, "98", TRANSACTIONS)
    yield _of("M98e", halves.open_again_after_a_take_over, CLUSTER, "66 96", TRANSACTIONS)


def _within_a_process() -> Iterator[Mutant]:
    yield _of("M86", inside.lost_with_its_bookie, CLUSTER, "no outcome", INSIDE)
    yield _of(
        "M86b", inside.answered_twice, DIRECTED, "5",
        "tests/runtime/peer/test_inside.py::test_requests_may_be_answered_in_any_order_and_once",
        "which request comes after the answered one is chance in a seed",
    )  # fmt: skip


def _of_wires() -> Iterator[Mutant]:
    why = "a seed's wires have no frames"
    for id_, plant, target in (
        ("M65", wires.reset_and_not_credited,
         f"{_PATIENCE}::test_bytes_of_streams_that_are_reset_before_they_are_read_are_credited"),
        ("M65b", wires.patient_for_ever,
         f"{_PATIENCE}::test_a_stranger_that_sends_what_carries_nothing_is_told_to_be_calm_soon"),
        ("M65c", wires.slice_without_end,
         f"{_PATIENCE}::test_a_connection_has_a_slice_of_a_turn_and_the_others_have_their_turn_between"),
        ("M81t", wires.entries_before_receipts, f"{_PEERS}::test_a_publish_waits_for_one_answer_of_those_who_catch_up"),
        ("M81u", wires.answers_without_end,
         f"{_PEERS}::test_a_client_takes_a_few_mebibytes_of_answers_at_a_time"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, why)


def _of_moves() -> Iterator[Mutant]:
    """A bundle that a broker gives away, while both brokers live."""
    moves = "tests/broker/cluster/test_moves.py::"
    for id_, plant, target, why in (
        ("M30c", brokers.served_on_while_it_is_given_away,
         f"{moves}test_a_bundle_has_one_owner_at_each_step_of_a_move", "fencing protects the data: a seed is slower"),
        ("M30d", brokers.given_away_before_it_is_closed,
         f"{moves}test_a_bundle_has_one_owner_at_each_step_of_a_move", "as M30c"),
        ("M30h", brokers.old_number_is_taken, _SPLIT, "no seed splits bundles"),
        ("M30i", brokers.half_is_taken, _SPLIT, "as M30h"),
        ("M39b", subscriptions.last_acks_do_not_count,
         f"{moves}test_acknowledgements_on_their_way_while_a_topic_moves_count",
         "a seed may deliver again what was acknowledged without a receipt"),
        ("M39c", clients.last_acks_wait_for_the_next_owner,
         f"{moves}test_what_a_program_acknowledged_is_stored_before_its_consumer_subscribes_at_the_next_owner",
         "as M39b"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, "", target, why)


def _passed_over() -> Iterator[Mutant]:
    """What a tier that draws at random does not come by: most were alive until they had a test of their own."""
    topic, log, core = "tests/broker/topic/", "tests/broker/log/", "tests/broker/subscription/core/"
    for id_, plant, fells, target, why in (
        ("M66", subscriptions.freed_twice, "41",
         f"{core}test_dispatch.py::test_what_an_abort_gives_back_and_a_consumer_holds_already_has_one_holder",
         "the walk has no back-off that ends between two slices of an abort"),
        ("M67", transactions.forgotten_without_an_answer, "69",
         f"{topic}test_transactions_core.py::"
         "test_what_has_entries_here_stays_when_its_coordinator_gives_no_answer",
         "in the walk every coordinator answers"),
        *((id_, plant, "87",
           f"{topic}test_transactions.py::"
           "test_what_a_topic_and_its_coordinator_forgot_is_decided_by_an_operator_alone", "no seed loses outcomes")
          for id_, plant in (("M67b", transactions.forgotten_is_aborted), ("M67c", transactions.loss_is_not_stored))),
        ("M68", brokers.commit_sets_numbers_back, "84",
         f"{topic}test_dedup_core.py::"
         "test_a_producer_in_many_transactions_at_once_stores_each_id_once_and_what_an_abort_takes_back_is_new",
         "producers of seeds send beside no transaction of their own"),
        ("M68b", brokers.lone_chunk_counts, "32",
         f"{topic}test_dedup_core.py::test_an_id_counts_only_if_every_chunk_of_its_message_is_in_the_log",
         "clients of seeds send all chunks, and none is refused"),
        ("M68c", brokers.rest_of_a_refused_message, "32",
         f"{topic}test_dedup.py::"
         "test_after_a_chunk_that_is_refused_the_rest_of_its_message_is_too_and_its_id_is_new", "as M68b"),
        ("M69", subscriptions.persisted_mark_is_safe, "34",
         f"{core}test_cursor.py::test_after_a_seek_backwards_nothing_may_be_trimmed_that_is_wanted_again",
         "seeds of a cluster make no seeks"),
        ("M76", coordinators.lost_receipts_commit_all, "70",
         "tests/broker/transaction/test_coordinator_walk.py::"
         "test_of_a_topic_whose_receipts_the_client_lost_nothing_is_committed",
         "the walk's clients name all topics or none"),
        ("M77", brokers.snapshot_counts_before_it_is_stored, "34",
         f"{topic}test_dedup.py::"
         "test_a_snapshot_counts_when_it_is_stored_and_no_entry_after_the_one_before_is_trimmed_until_then",
         "needs a trim while a snapshot is on its way, and then a crash"),
        ("M78", security.read_before_is_kept, "46 47",
         f"{_GRANTS}::test_a_read_that_began_before_a_revocation_decides_nothing_after_it",
         "needs a revocation within a read of the grants"),
        ("M79", brokers.end_index_passes_an_open_transaction, "68",
         f"{topic}test_shown.py::"
         "test_a_compaction_ends_before_the_first_open_transaction_in_its_positions_and_in_its_indexes",
         "seeds with transactions compact nothing"),
        ("M30e", brokers.any_broker_gets_a_bundle, "",
         "tests/broker/cluster/test_isolation.py::test_whichever_broker_is_asked_an_allowed_one_gets_the_bundle",
         "namespaces of seeds ask for no labels"),
        ("M30f", brokers.primaries_take_all_back_at_once, "",
         "tests/balance/test_isolated.py::test_primary_brokers_that_flap_around_the_minimum_move_nothing_to_and_fro",
         "as M30e"),
        ("M30j", brokers.bundle_counts_with_one_report, "",
         f"{_BALANCE}test_balance.py::test_a_bundle_counts_with_the_mean_of_its_last_reports_and_a_burst_at_once",
         "seeds simulate no load"),
        ("M30k", brokers.target_counts_as_measured, "",
         f"{_BALANCE}test_balance.py::test_a_target_counts_as_busier_until_what_it_got_is_measured", "as M30j"),
        ("M30l", brokers.slow_target_counts_as_fast, "",
         f"{_BALANCE}test_balance.py::test_a_slow_broker_that_is_busy_tells_what_a_bundle_costs_there", "as M30j"),
        ("M30m", brokers.claimed_bundle_rests_at_its_owner, "",
         f"{_BALANCE}test_attacks.py::test_a_broker_that_claims_a_bundle_of_another_does_not_keep_it_there",
         "as M30j"),
        ("M30n", brokers.idle_liar_gets_bundles, "", _LIAR, "as M30j"),
        ("M30o", brokers.light_liar_is_believed, "", _LIAR, "as M30j"),
        ("M30p", metadata.changes_are_read_at_once, "",
         "tests/balance/test_balance.py::"
         "test_processes_that_hear_of_the_same_change_read_it_one_after_another_in_a_large_cluster",
         "clusters of seeds have few bookies"),
        ("M30g", brokers.lost_copies_go_anywhere, "",
         "tests/ledger/test_bookie_groups.py::"
         "test_auto_recovery_makes_copies_within_the_group_and_elsewhere_only_when_the_group_is_used_up",
         "bookies of seeds have no groups"),
        ("M87", brokers.first_compaction_holds_nothing, "34",
         f"{log}test_compaction.py::"
         "test_from_the_start_of_the_first_compaction_on_the_log_is_held_until_its_survivors_are_copied",
         "seeds compact nothing"),
        ("M87b", brokers.chunks_of_another_round, "",
         f"{log}test_compaction_core.py::"
         "test_a_message_whose_chunks_lie_around_the_end_of_a_rounds_memory_is_decided_once", "seeds compact nothing"),
        ("M88", security.open_reads_go_on, "46 47",
         f"{_GRANTS}::test_a_read_of_a_range_that_is_under_way_ends_when_its_role_loses_the_right",
         "seeds read no ranges"),
        ("M89", clients.given_back_survives_a_seek, "",
         "tests/client/core/test_consumer_walk.py::test_what_was_given_back_before_a_seek_is_not_asked_for_after_it",
         "the walk's application takes what comes twice"),
        ("M89b", clients.closed_twice_opens_twice, "", "tests/simulation/test_late_frames.py",
         "in a seed that is drawn few ids are closed"),
        ("M89c", clients.handled_while_it_is_handled, "",
         "tests/client/consume/test_listening.py::"
         "test_a_message_that_comes_again_while_its_handler_runs_is_not_handled_a_second_time",
         "seeds have no listeners"),
        ("M89d", clients.permits_before_the_handler, "",
         "tests/client/consume/test_listening.py::test_a_slow_handler_asks_for_no_more_than_the_receiver_queue",
         "seeds have no listeners"),
        ("M89e", subscriptions.held_since_the_last_look, "",
         "tests/broker/subscription/core/test_held_slots.py::"
         "test_a_key_is_held_since_the_look_that_first_saw_its_oldest_entry_and_counts_what_follows_it",
         "seeds ask for no statistics"),
        ("M99", subscriptions.acknowledged_is_due_again, "",
         f"{core}test_delays_core.py", "a restart with holes among what is delayed is rare in a seed"),
        ("M99b", subscriptions.first_message_decides, "",
         "tests/proto/test_entry_filter.py::test_the_verdicts_of_a_batch_are_those_of_its_messages",
         "subscriptions of seeds have no filter"),
        ("M99c", subscriptions.hidden_from_everybody, "",
         f"{core}test_dispatch_walk.py::test_what_a_filter_does_not_want_is_acknowledged_and_holds_up_nothing",
         "as M99b"),
        ("M99d", subscriptions.judged_for_ever, "",
         "tests/broker/subscription/test_filtering.py::test_after_a_reset_filtered_messages_are_judged_again",
         "as M99b"),
        ("M99e", subscriptions.verdicts_of_another_entry, "",
         "tests/proto/test_entry_filter.py::test_verdicts_that_depend_on_the_entry_are_not_kept_for_the_next_one",
         "as M99b"),
        ("M99f", subscriptions.rest_is_hidden_from_whole_ackers, "",
         f"{core}test_dispatch_walk.py::test_a_consumer_of_whole_entries_is_shown_whole_ones_and_ends_the_backlog",
         "consumers of seeds acknowledge by index"),
        ("M99g", subscriptions.next_window_supersedes, "",
         "tests/client/core/test_debounce.py"
         "::test_a_backlog_is_debounced_by_the_times_of_its_messages_and_not_by_that_of_its_delivery", "a core alone"),
        ("M99h", subscriptions.error_stays_with_its_consumer, "",
         "tests/client/consume/test_errors_in_letters.py"
         "::test_the_error_reaches_the_letter_when_another_consumer_gets_the_message_last", "no seed reads letters"),
        ("M99i", subscriptions.former_worker_writes_on, "",
         "tests/client/test_streams.py"
         "::test_a_worker_that_was_replaced_commits_nothing_and_the_state_is_that_of_the_other", "no seed has steps"),
        ("M99j", subscriptions.expired_is_redelivered, "",
         "tests/broker/subscription/test_expiry.py::test_it_is_judged_again_at_each_redelivery_and_not_while_it_is_outstanding",
         "messages of seeds do not expire"),
        ("M99k", subscriptions.cancelled_although_delivered, "",
         "tests/broker/session/test_cancel_delayed.py::test_it_is_refused_when_one_subscription_has_got_it_and_the_others_still_get_it",
         "seeds cancel nothing"),
        ("M99l", subscriptions.fired_again, "",
         "tests/broker/session/test_schedules.py::test_a_broker_that_dies_at_any_step_leaves_a_fire_once",
         "seeds have no schedules"),
        ("M99m", subscriptions.letters_of_long_names_mixed, "",
         "tests/proto/test_names.py::test_shortened_letter_topics_of_different_topics_and_subscriptions_are_different",
         "names of seeds are short"),
        ("M99n", subscriptions.cumulative_in_unchecked_steps, "",
         "tests/broker/subscription/test_acks.py"
         "::test_a_large_cumulative_ack_that_is_refused_acknowledges_nothing", "seeds acknowledge what exists"),
        ("M99o", subscriptions.name_is_free_at_once, "",
         "tests/broker/topic/test_lost_subscriptions.py"
         "::test_a_name_is_free_when_its_deletion_has_ended_and_a_failed_one_is_repeated",
         "programs of seeds do not repeat it"),
        ("M99p", brokers.ledgers_of_one_age_end_together, "",
         "tests/broker/log/test_log_shape.py"
         "::test_ten_thousand_topics_of_one_age_end_their_ledgers_evenly_over_a_fifth_of_it",
         "a seed lives for minutes, and has few topics"),
        ("M97p", subscriptions.loose_holes_stop_delivery, "",
         "tests/broker/subscription/core/test_dispatch.py"
         "::test_holes_that_take_few_bytes_when_they_are_compressed_hold_up_nothing",
         "subscriptions of seeds have few holes"),
        ("M97q", subscriptions.written_holes_keep_their_size, "",
         "tests/broker/subscription/core/test_cursor.py"
         "::test_the_size_of_holes_that_a_write_has_compressed_is_counted_again", "as M97p"),
        ("M99q", subscriptions.holes_from_before_a_seek_count, "",
         "tests/broker/subscription/test_cursors.py"
         "::test_after_a_seek_the_holes_of_an_older_ledger_do_not_count", "bookies of seeds take ledgers"),
        ("M99r", subscriptions.state_without_room_is_durable, "",
         "tests/broker/subscription/test_cursors.py"
         "::test_of_a_state_without_room_the_last_holes_wait_for_a_ledger_and_none_that_was_durable_is_lost",
         "as M99q"),
        ("M99s", bookies.every_add_is_answered_from_memory, "18",
         "tests/bookie/test_unsynced_adds.py"
         "::test_wherever_the_power_fails_an_unsynced_ledger_alone_loses_and_no_more_than_its_last_answers",
         "topics of seeds are on disks"),
        ("M99t", ledgers.one_bookie_that_lost_it_ends_the_ledger, "",
         "tests/ledger/test_unsynced_ledgers.py"
         "::test_an_entry_that_one_bookie_lost_is_found_at_the_other_although_one_miss_would_prove_its_absence",
         "as M99s"),
        ("M99u", ledgers.end_before_any_sync, "",
         "tests/ledger/test_unsynced_ledgers.py::test_the_end_is_stored_after_one_bookie_has_synced_all", "as M99s"),
        ("M99v", clients.sent_is_done, "",
         "tests/broker/topic/test_durability.py"
         "::test_a_send_with_acks_none_ends_before_the_broker_answers_and_the_message_arrives",
         "programs of seeds wait for receipts"),
        ("M99w", ledgers.first_copies_out_of_order, "",
         "tests/ledger/test_first_copies.py::test_an_entry_has_a_first_copy_when_all_before_it_have_one", "as M99v"),
        ("M99x", ledgers.first_copy_confirms, "",
         "tests/ledger/test_first_copies.py::test_the_first_copies_are_told_in_order_and_confirm_nothing", "as M99v"),
        ("M99y", clients.first_copy_is_done, "",
         "tests/broker/topic/test_durability.py"
         "::test_what_had_one_copy_when_its_broker_lost_the_topic_is_counted_logged_and_sent_again", "as M99v"),
        ("M98h", subscriptions.redriven_to_all, "",
         "tests/client/test_redrive.py::test_a_letter_reaches_the_one_subscription_that_gave_it_up_and_readers",
         "no seed sends letters back"),
        ("M98i", subscriptions.redriven_in_every_topic, "",
         "tests/broker/subscription/test_redriven.py::test_only_in_the_topic_that_it_names_it_is_for_one_subscription",
         "as M98h"),
        ("M98j", clients.owners_are_asked_once, "",
         "tests/client/consume/test_group_walk.py"
         "::test_each_partition_has_one_member_by_the_strategy_when_nobody_comes_or_goes", "seeds have no groups"),
        ("M98k", clients.revoked_at_once, "",
         "tests/client/consume/test_group_walk.py::test_one_view_that_lacks_a_member_revokes_nothing", "as M98j"),
        ("M98l", clients.interrupted_and_still_owner, "",
         "tests/client/test_pull_group.py"
         "::test_a_partition_whose_connection_was_interrupted_is_taken_again_at_its_position", "as M98j"),
        ("M98s", brokers.share_given_away_before_it_is_given_back, "",
         "tests/broker/cluster/test_shares.py::test_a_share_grows_after_the_other_one_has_said_that_it_shrank",
         "seeds limit nothing in sum over brokers"),
        ("M98t", brokers.topics_counted_before_others_are_made, "",
         "tests/broker/cluster/test_shared_limits.py"
         "::test_brokers_that_create_topics_at_once_make_as_many_as_the_namespace_may_have", "as M98s"),
        ("M98u", brokers.a_range_counts_beside_its_parts, "",
         "tests/broker/cluster/test_stored.py"
         "::test_the_parts_of_a_bundle_count_instead_of_it_and_what_is_left_until_then_of_the_rest", "as M98s"),
        ("M98v", brokers.an_incomplete_sum_is_believed, "",
         "tests/broker/cluster/test_stored.py::test_an_incomplete_sum_lets_no_producer_go_on", "as M98s"),
        ("M98w", brokers.topics_that_leave_memory_store_nothing, "",
         "tests/broker/cluster/test_stored.py::test_a_bundle_counts_its_loaded_topics_and_those_that_left_memory",
         "as M98s"),
    ):  # fmt: skip
        yield _of(id_, plant, DIRECTED, fells, target, why)


def _of_security() -> Iterator[Mutant]:
    for id_, plant, tier, fells, target, why in (
        ("M50", security.open_ones_stay, CLUSTER, "46 47", SECURED, ""),
        ("M51", security.broken_watch_changes_nothing, DIRECTED, "46 47", _STALE,
         "needs a change while a watch is broken and nothing else changes"),
        ("M52", security.stale_for_ever, DIRECTED, "46 47", _STALE, "a seed has no 30 s without metadata"),
        ("M53", security.read_failed_is_decided, DIRECTED, "46 47",
         f"{_GRANTS}::test_a_revocation_whose_grants_cannot_be_read_at_once_holds_as_soon_as_they_can",
         "needs a read that fails between two changes"),
        ("M54", security.second_name_is_not_asked, CLUSTER, "46", SECURED, ""),
        ("M55", security.forwarded_by_anybody, DIRECTED, "46",
         f"{_TABLE}::test_an_identity_in_a_request_counts_for_nothing", "clients of a seed do not speak as brokers"),
        ("M56", security.partitions_have_no_base, DIRECTED, "49", "tests/broker/access", "a seed has one partition"),
        ("M57", security.wrong_becomes_anonymous, DIRECTED, "46 47",
         f"{_WHO}::test_a_token_says_who_calls_and_wrong_credentials_never_become_anonymous",
         "seeds have no anonymous role"),
        ("M58", security.streams_outlive_credentials, CLUSTER, "46 47", SECURED, ""),
        ("M59", security.remembered_for_ever, DIRECTED, "46 47",
         f"{_WHO}::test_a_remembered_token_expires_and_a_new_key_forgets_it", "programs of a seed renew their tokens"),
        ("M60", security.any_key_is_a_members, DIRECTED, "46",
         f"{_MEMBERS}::test_members_know_each_other_at_once_and_no_stranger {_STRANGERS}",
         "seeds with a stranger and keys are few"),
        ("M61", security.dead_members_stay, DIRECTED, "46",
         f"{_MEMBERS}::test_the_key_of_a_dead_process_opens_nothing_when_its_session_ends_and_that_of_a_closed_one_at_once",
         "the processes of a seed lose their keys with their lives"),
        ("M62", security.keys_end_with_the_session, DIRECTED, "48",
         f"{_SECURED}::test_without_metadata_open_traffic_goes_on_and_after_half_a_minute_no_other_is_admitted",
         "a seed sees it as a delay alone"),
        ("M70", pending.commit_takes_the_batch, DIRECTED, "79", f"{_PENDING}::test_two_transactions_share_a_batch",
         "the exhaustive walk makes every step of two transactions from every state"),
        ("M70b", pending.delivered_twice_in_the_sdk, CLUSTER, "80", TRANSACTIONS, ""),
        ("M70e", pending.shown_again_and_covered, DIRECTED, "80", "tests/client/transactions/test_transactions.py",
         "seeds acknowledge message by message"),
        ("M70c", pending.delivered_twice_in_the_broker, CLUSTER, "80", TRANSACTIONS, ""),
        ("M70d", pending.bits_above_what_is_held, CLUSTER, "80", TRANSACTIONS, ""),
        ("M71", pending.settled_and_still_pending, DIRECTED, "79", _PENDING, "as M70"),
        ("M72", pending.pending_comes_again, DIRECTED, "77",
         "tests/broker/subscription/core/test_dispatch_walk.py", "as M32"),
        ("M73", pending.refused_in_the_middle, DIRECTED, "81", _PENDING, "as M70"),
        ("M74", pending.aborted_is_acknowledged, DIRECTED, "79",
         f"{_PENDING}::test_abort_gives_back_exactly_its_own", "as M70"),
        ("M75", pending.abort_forgets_the_order, DIRECTED, "79",
         "tests/broker/subscription/core/test_dispatch_walk.py", "as M32"),
    ):  # fmt: skip
        yield _of(id_, plant, tier, fells, target, why)


BANK: dict[str, Mutant] = {mutant.id: mutant for mutant in sorted(_all(), key=lambda each: each.id)}
assert len(BANK) == len(list(_all())), "one id is one defect"


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        mutant.plant(stack)
        yield
