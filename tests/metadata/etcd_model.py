"""etcd in the plainest words: what a transaction, a lease, a compaction and a watch do, in memory and without waiting.

A real etcd answers the same: test_etcd_core.py asks both.
"""

from magnetar.proto import etcd_pb2 as etcd


class EtcdModel:
    def __init__(self, txn_operations_max: int = 128) -> None:
        self.revision = 1
        self.compacted = 0
        self.pairs: dict[bytes, etcd.KeyValue] = {}
        self.events: list[etcd.Event] = []
        self.leases: set[int] = set()
        self._max = txn_operations_max

    # ------------------------------------------------------------------ reading
    def range(self, request: etcd.RangeRequest) -> etcd.RangeResponse:
        keys = sorted(key for key in self.pairs if _is_in(key, request.key, request.range_end))
        limit = request.limit or len(keys)
        answer = etcd.RangeResponse(header=self.header(), count=len(keys), more=len(keys) > limit)
        for key in keys[:limit] if not request.count_only else ():
            pair = answer.kvs.add()
            pair.CopyFrom(self.pairs[key])
            if request.keys_only:
                pair.ClearField("value")
        return answer

    def header(self) -> etcd.ResponseHeader:
        return etcd.ResponseHeader(revision=self.revision)

    # ------------------------------------------------------------------ writing
    def txn(self, request: etcd.TxnRequest) -> etcd.TxnResponse:
        """Raises ValueError where etcd refuses with INVALID_ARGUMENT."""
        if max(len(request.compare), len(request.success), len(request.failure)) > self._max:
            raise ValueError("too many operations in txn request")
        for branch in (request.success, request.failure):
            puts = [each.request_put.key for each in branch if each.HasField("request_put")]
            deletes = [each.request_delete_range for each in branch if each.HasField("request_delete_range")]
            met = any(_is_in(key, delete.key, delete.range_end) for key in puts for delete in deletes)
            if len(set(puts)) < len(puts) or met:
                raise ValueError("duplicate key given in txn request")
        succeeded = all(self._holds(each) for each in request.compare)
        answer = etcd.TxnResponse(succeeded=succeeded)
        revision = self.revision + 1
        begun = len(self.events)
        for each in request.success if succeeded else request.failure:
            self._do(each, revision, answer.responses.add())
        if len(self.events) > begun:
            self.revision = revision
        answer.header.CopyFrom(self.header())
        return answer

    def _holds(self, compare: etcd.Compare) -> bool:
        found = [pair for key, pair in self.pairs.items() if _is_in(key, compare.key, compare.range_end)]
        return all(self._compares(compare, pair) for pair in found or [etcd.KeyValue()])

    def _compares(self, compare: etcd.Compare, pair: etcd.KeyValue) -> bool:
        if compare.target == etcd.Compare.VERSION:
            found, wanted = pair.version, compare.version
        else:
            assert compare.target == etcd.Compare.MOD
            found, wanted = pair.mod_revision, compare.mod_revision
        return found > wanted if compare.result == etcd.Compare.GREATER else found == wanted

    def _do(self, operation: etcd.RequestOp, revision: int, answer: etcd.ResponseOp) -> None:
        match operation.WhichOneof("request"):
            case "request_range":
                answer.response_range.CopyFrom(self.range(operation.request_range))
            case "request_put":
                self._put(operation.request_put, revision)
                answer.response_put.SetInParent()
            case _:
                request = operation.request_delete_range
                keys = sorted(key for key in self.pairs if _is_in(key, request.key, request.range_end))
                for key in keys:
                    self._delete(key, revision)
                answer.response_delete_range.deleted = len(keys)

    def _put(self, request: etcd.PutRequest, revision: int) -> None:
        assert not request.lease or request.lease in self.leases, "requested lease not found"
        before = self.pairs.get(request.key, etcd.KeyValue(create_revision=revision))
        self.pairs[request.key] = etcd.KeyValue(
            key=request.key, value=request.value, lease=request.lease, mod_revision=revision,
            create_revision=before.create_revision, version=before.version + 1,
        )  # fmt: skip
        self.events.append(etcd.Event(type=etcd.Event.PUT, kv=self.pairs[request.key]))

    def _delete(self, key: bytes, revision: int) -> None:
        del self.pairs[key]
        self.events.append(etcd.Event(type=etcd.Event.DELETE, kv=etcd.KeyValue(key=key, mod_revision=revision)))

    # ------------------------------------------------------------------ leases, history
    def grant(self, lease: int) -> None:
        self.leases.add(lease)

    def revoke(self, lease: int) -> None:
        self.leases.discard(lease)
        keys = sorted(key for key, pair in self.pairs.items() if pair.lease == lease)
        for key in keys:
            self._delete(key, self.revision + 1)
        self.revision += bool(keys)

    def compact(self, revision: int) -> None:
        """Forgets what was before `revision`, and, as etcd did until 3.4.36, deletions at it."""
        self.compacted = revision
        self.events = [
            event for event in self.events
            if event.kv.mod_revision > revision or (event.type == etcd.Event.PUT and event.kv.mod_revision == revision)
        ]  # fmt: skip

    def watch(self, create: etcd.WatchCreateRequest, after: int = 0) -> list[etcd.WatchResponse]:
        """What a watch is told at once: after it was told the events up to the revision `after`."""
        if create.start_revision < self.compacted:
            ended = etcd.WatchResponse(canceled=True, compact_revision=self.compacted)
            return [etcd.WatchResponse(created=True), ended]
        events = [
            event for event in self.events
            if _is_in(event.kv.key, create.key, create.range_end)
            and event.kv.mod_revision >= create.start_revision and event.kv.mod_revision > after
        ]  # fmt: skip
        told = [etcd.WatchResponse(header=self.header(), created=True)]
        for number, event in enumerate(events):  # each in a fragment of its own
            told.append(
                etcd.WatchResponse(header=self.header(), events=[event], fragment=number < len(events) - 1)
            )
        return told


def _is_in(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key < end if end else key == first
