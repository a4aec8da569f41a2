"""One run from its claim to its manifest, in the phases through which the command, a BatchJob's pods and a server's batches take it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from banyan_runtime.batch import entries, identity, protocol, records
from banyan_runtime.batch.documents import FOLDER, OWNER, InputObject, Keys, Outcome, Owner, Plan, Reason, State, Stop
from banyan_runtime.batch.earlier import Earlier
from banyan_runtime.batch.errors import (
    AccessDenied,
    ConditionalWritesUnsupported,
    InputChanged,
    InputInvalid,
    InputNotFound,
    InvalidSpec,
    OutputExists,
    ResultsDamaged,
    Unfinished,
    from_store,
    store_errors,
)
from banyan_runtime.batch.executor import Executor
from banyan_runtime.batch.hands import Hands
from banyan_runtime.batch.lines import LineParser
from banyan_runtime.batch.order import Order
from banyan_runtime.batch.planner import plan_of, scan
from banyan_runtime.batch.progress import Progress
from banyan_runtime.batch.protocol import Assembled, Claim, Claimed, Published, Steps, Taken
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, InputFile, Manifest, RequestCounts, ResultFile
from banyan_runtime.batch.results import ResultFiles
from banyan_runtime.batch.source import CONFIRM_S, Source, found_again
from banyan_runtime.batch.worker import Sends, Worker
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.probe import Conditions, probe
from banyan_runtime.storage.store import Denied, NotFound, StoreError, Unreachable
from banyan_runtime.storage.unfenced import UnfencedStore

FIRST_BYTES: Final = 1 << 16  # of errors.jsonl, which its first line is looked for in
CONFIRM_PARTS_S: Final = (*CONFIRM_S, 15.0, 30.0)
"""Pauses before results that cannot be made of what is in the storage are made again: a part that is gone or damaged may be neither."""
LEFTOVERS_S: Final = 6 * 3600.0  # uploads and temporary files that began so long ago are of writers that died: a merge takes minutes
T = TypeVar("T")


class Run:
    """The phases in their order: `claim`, `plan`, `work`, `merge`. Each may be repeated, by whatever process, after any interruption.
    Raises the errors of `batch.errors`.
    """

    def __init__(self, order: Order, progress: Progress, hands: Hands, say: Callable[[str], None]) -> None:
        self._order = order
        self._progress = progress
        self._hands = hands
        self._say = say
        self._executor = Executor(order.output, order.patience)
        self._owner: Owner | None = None
        self._plan: Plan | None = None
        self._source: Source | None = None
        self._worker: Worker | None = None
        self._quit = False

    @property
    def name(self) -> str | None:
        """None until it has the output."""
        return self._owner.run if self._owner is not None else None

    def use_model(self, name: str) -> None:
        """Ask for this model, whatever the lines call it."""
        self._order = dataclasses.replace(self._order, model=name)

    @property
    def the_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def quit(self) -> None:
        """Start no more lines, and let reading end."""
        self._quit = True
        if self._worker is not None:
            self._worker.quit()
        if self._source is not None:
            self._source.stop()

    # --- phases ---

    async def claim(self) -> Manifest | None:
        """Make the output ours. Returns the manifest if this very run has published already."""
        order = self._order
        if order.begun:
            order.output.store.trust()
        with store_errors(reading=False):
            try:
                found = await self._hands.do(lambda: order.patience.retry(order.output.uri, self._probe))
            except (Denied, NotFound) as error:  # the name of the object that was tried out tells nobody anything
                refused = from_store(type(error)(order.output.uri, error.message), reading=False)
                refused.field = "--output"
                raise refused from error
            self._progress.fenced = found.writes
            if not found.writes and not order.allow_unfenced:
                raise ConditionalWritesUnsupported(
                    "this storage ignores the conditions of writes (If-None-Match, If-Match), so results could be lost or doubled when two "
                    "workers meet; use another storage",
                    value=order.output.uri,
                    hint="or accept it with --allow-unfenced and one worker",
                )
            if not found.writes:
                order = self._order = dataclasses.replace(order, output=Location(UnfencedStore(order.output.store), order.output.key))
                self._executor = Executor(order.output, order.patience)
                self._say(f"warning: {order.output.uri} is in a storage without conditional writes; let no second run write there")
            order.output.store.trust()
            with contextlib.suppress(StoreError):  # not every store can list them
                for name in (OUTPUT, ERRORS, MANIFEST, f"{FOLDER}/"):  # a whole bucket is perhaps the output, and others write there
                    await self._hands.do(functools.partial(order.output.store.sweep, order.output.child(name).key, LEFTOVERS_S))
            while True:
                gone = await self._hands.do(self._gone)
                claim = Claim(
                    order.run, secrets.token_hex(16), order.digest, identity.own_name(), identity.nonce(), _now(), order.overwrite
                )
                got = await self._do(protocol.claim_output(claim, gone))
                if isinstance(got, Claimed):
                    self._owner = got.owner
                    if got.resumed and order.run is None and await self._input_changed():
                        self._say(f"the input is not what it was when run {got.owner.run} began, which was not ended; a new run begins")
                        await self._do(protocol.release_output(got.owner, identity.nonce(), finished=True))
                        continue
                    if got.resumed and order.run is None:
                        self._say(f"going on with run {got.owner.run}, begun {got.owner.started_at}")
                    return None
                if isinstance(got, Published):
                    if order.run is not None and got.manifest.endpoint != order.endpoint:
                        raise InvalidSpec(
                            f"run {order.run} has called {got.manifest.endpoint}, and has published its results",
                            field="--endpoint",
                            value=order.endpoint,
                            hint="give the same, or another --run-id",
                        )
                    owner = await self._published(got.manifest.run)
                    named = [InputObject.of(file) for file in got.manifest.input]
                    if order.run is None and owner is not None and await self._differs(named):
                        continue  # it is finished now, and what is asked for is something else
                    return got.manifest
                raise self._taken(got)

    def _probe(self, _: object) -> Conditions:
        order = self._order
        try:
            return probe(order.output.store, order.output.child(f"{FOLDER}/").key)
        except StoreError as error:
            if order.begun and type(error) is StoreError:  # it was in order when the run was planned
                raise Unreachable(error.key, error.message, reason=error.reason) from error
            raise

    async def plan(self) -> Plan:
        """Count, check and cut the input, or find the plan that is there."""
        assert self._owner is not None
        keys = Keys(self._owner.run)
        await self._find_plan(keys)
        if self._order.input is not None:
            self._order.input.store.trust()  # it was read
        return self.the_plan

    async def _find_plan(self, keys: Keys) -> None:
        assert self._owner is not None
        with store_errors(reading=False):
            found = await self._do(protocol.read(keys.plan))
            for pause_s in CONFIRM_S if self._order.begun else ():  # it was made before: a moment without it is none without a plan
                if found is None:
                    away = StoreError(self._order.output.child(keys.plan).uri, "the plan is not there")
                    await self._hands.do(functools.partial(self._order.patience.pause, pause_s, away))
                    found = await self._do(protocol.read(keys.plan))
            if found is not None:
                self._plan = Plan.decode(found.body, self._owner.run)
                await self._refuse_another(self._plan)
                self._source = self._source_of(self._plan)
                return
        try:
            plan = await self._make_plan()
        except (InputInvalid, InputNotFound, InputChanged, AccessDenied, InvalidSpec):
            with contextlib.suppress(StoreError):  # nothing was begun: the output is free again
                await self._do(protocol.release_output(self._owner, identity.nonce(), finished=True, unchanged=True))
            raise
        with store_errors(reading=False):
            self._plan = await self._do(protocol.settle_plan(keys, plan))
            await self._refuse_another(self._plan)  # another may have been first
        self._source = self._source_of(self._plan)

    async def work(self, sender: Sends, grace_s: Callable[[], float] = lambda: 0.0) -> bool:
        """Work on shards until all have ended (True), or until `quit`, or the run is stopped by whoever ends it early (False)."""
        assert self._source is not None
        self._progress.workers = self._order.pace.workers
        with store_errors(reading=False):
            self._worker = Worker(
                self._order.output,
                self.the_plan,
                self._source,
                self._parser,
                sender,
                self._progress,
                self._order.pace,
                self._hands,
                self._order.patience,
                self._check,
                self._say,
            )
            if self._quit:
                self._worker.quit()
            return await self._worker.work(grace_s)

    async def begun(self) -> tuple[bool, int]:
        """Whether the server has answered a line of this run before, and, if not, how many lines are left to send."""
        keys, completes = Keys(self.the_plan.run), self.the_plan.completes
        left = self.the_plan.total - (completes.lines if completes is not None else 0)
        with store_errors(reading=False):
            folder = self._order.output.child(keys.folder + "shards/")
            numbers = await self._hands.do(lambda: [int(info.key[-11:-5]) for info in folder.store.list(folder.key)])
            for shard in numbers:
                state = (await self._do(protocol.look_at(keys, shard))).state
                if state.completed:
                    return True, left
                left -= state.failed
        return False, left

    async def ended(self) -> Reason | None:
        """Why somebody has ended it early, if that was not carried out to its end."""
        assert self._owner is not None
        with store_errors(reading=False):
            found = await self._do(protocol.read(Keys(self._owner.run).stop))
        return None if found is None else Stop.decode(found.body).reason

    @property
    def stopped(self) -> Reason | None:
        """Why the run was ended early, as far as the last `work` has seen."""
        return self._worker.stopped if self._worker is not None else None

    async def release(self) -> None:
        """Say that nobody works on it any more, so that the same order can take it up at once."""
        if self._owner is not None:
            with contextlib.suppress(StoreError):
                await self._do(protocol.release_output(self._owner, identity.nonce(), finished=False))

    async def merge(self, partial: Reason | None = None) -> Manifest:
        """Publish. With `partial`, whatever is unfinished ends first as it is. Raises Unfinished if there is work left without it."""
        assert self._owner is not None
        assert self._source is not None
        plan, keys = self.the_plan, Keys(self._owner.run)
        with store_errors(reading=False):
            if partial is not None:
                await self._do(protocol.stop_run(keys, Stop(partial, identity.nonce())))
                numbers = range(len(plan.shards))
                await asyncio.gather(*(self._do(protocol.freeze(keys, shard, identity.nonce())) for shard in numbers))
            results = ResultFiles(self._order.output, plan, self._source, self._parser, self._completed(plan))
            got = await self._merged(keys, self._owner, plan, results)
            if isinstance(got, Taken):
                raise self._taken(got)
            if isinstance(got, protocol.Unfinished):
                await self._check()
                raise Unfinished(
                    f"{self._order.output.uri}: {len(got.shards)} of {len(plan.shards)} shards have not ended; nothing was published"
                )
            await self._published(plan.run)
        return got.manifest

    async def first_reason(self) -> str | None:
        """Why the first line failed that is in errors.jsonl, for whoever reads no file; None: it cannot be told."""
        output = self._order.output
        with contextlib.suppress(StoreError):
            return records.reason(await self._hands.do(lambda: output.store.get(output.child(ERRORS).key, end=FIRST_BYTES)))
        return None

    # --- how ---

    async def _merged(self, keys: Keys, owner: Owner, plan: Plan, results: ResultFiles) -> protocol.Published | Taken | protocol.Unfinished:
        """Raises ResultsDamaged where parts stay away or damaged. The run stays as it is then: they may come back."""
        executor = Executor(self._order.output, self._order.patience, results)
        make = functools.partial(self._manifest, plan)
        for pause_s in (*CONFIRM_PARTS_S, None):
            steps = protocol.merge(keys, owner, plan, make, identity.nonce())
            try:
                got = await self._hands.do(functools.partial(executor.run, steps))
                if not isinstance(got, protocol.Removed):
                    return got
                trouble = StoreError(self._order.output.uri, f"parts of run {plan.run} are gone, which somebody has removed")
            except entries.DamagedPart as error:
                trouble = error
            if pause_s is None:
                break
            self._say(f"warning: {trouble}; it is read again in {pause_s:.0f} s")
            await self._hands.do(functools.partial(self._order.patience.pause, min(pause_s, self._order.patience.limit_s), trouble))
        await self._do(protocol.release_output(owner, identity.nonce(), finished=False, damaged=True))
        raise ResultsDamaged(
            f"{trouble.message}; its shard has ended, so run {plan.run} can publish nothing until it is back as it was",
            value=trouble.key,
            hint="bring it back and give the same command, or begin a new run (--overwrite)",
        )

    async def _input_changed(self) -> bool:
        """Whether the run that was left unfinished began with another version of the input."""
        assert self._owner is not None
        found = await self._do(protocol.read(Keys(self._owner.run).plan))
        if found is None:
            return False
        plan = Plan.decode(found.body, self._owner.run)
        earlier = self._completed(plan)
        if earlier is not None and plan.completes is not None:
            output = msgspec.structs.replace(plan.completes.output, key=earlier.key)
            return await self._hands.do(lambda: found_again(earlier.store, output)) is None
        return await self._differs(plan.inputs)

    async def _differs(self, planned: Sequence[InputObject]) -> bool:
        """Whether the input is another than `planned`."""
        given = self._order.input
        if given is None:
            return False  # the run that is completed names it; who reads it finds out
        source = await self._hands.do(self._find_input)
        if [one.uri for one in source.objects] != [one.uri for one in planned]:
            return True
        pairs = zip(source.objects, planned, strict=True)
        others = [msgspec.structs.replace(was, key=now.key) for now, was in pairs if (now.tag, now.bytes) != (was.tag, was.bytes)]
        return not await self._hands.do(lambda: all(found_again(given.store, one) is not None for one in others))

    @property
    def _parser(self) -> LineParser:
        return LineParser(self._order.endpoint, self._order.model, self._order.priority, self._order.force_priority)

    def _completed(self, plan: Plan) -> Location | None:
        """The output that is completed, or its copy."""
        if plan.completes is None:
            return None
        assert self._order.completes is not None
        return Location(self._order.completes.store, plan.completes.output.key)

    async def _check(self) -> None:
        """Raise if the output is not this run's any more: what it did further would be for nothing."""
        assert self._owner is not None
        held = None
        for pause_s in (0.0, *CONFIRM_S):  # a bucket that is away for a moment looks the same
            await asyncio.sleep(pause_s)
            if (held := await self._do(protocol.read(OWNER))) is not None:
                break
        if held is None:
            raise Unfinished(
                f"what run {self._owner.run} keeps there was removed while it worked; nothing was published",
                value=self._order.output.uri,
                hint="the same command begins anew",
            )
        if (run := Owner.decode(held.body).run) != self._owner.run:
            raise self._taken(Taken(OWNER, run, False))

    def _gone(self) -> Sequence[str]:
        """Holders of the output that are known to have ended."""
        held = self._executor.run(protocol.read(OWNER))
        owner = Owner.decode(held.body) if held is not None else None
        return [owner.holder] if owner is not None and owner.holder is not None and identity.is_gone(owner.holder) else []

    async def _make_plan(self) -> Plan:
        assert self._owner is not None
        order, self._progress.phase = self._order, "planning"
        with store_errors(reading=True):
            earlier = None
            if order.completes is not None and order.open_uri is not None:
                earlier = await self._hands.do(functools.partial(Earlier, order.completes, order.open_uri, order.endpoint))
            kept = await self._hands.do(earlier.kept) if earlier is not None else None
            self._source = source = await self._hands.do(earlier.source if earlier is not None else self._find_input)
            if self._quit:
                source.stop()
            found = await self._hands.do(lambda: scan(source, self._parser, order.cut, kept=kept))
        if order.strict and found.invalid:
            first = found.problems[0]
            raise InputInvalid(
                f"line {first.number}: {first.code}: {first.message} ({found.invalid} bad lines)",
                code="invalid_line",
                hint="--on-invalid-line record puts them into errors.jsonl and runs the others",
            )
        if not found.all_ids_checked:
            self._say("warning: the input is too long to check all custom_ids; later duplicates are sent")
        completes = None
        if earlier is not None and kept is not None:
            aside = order.output.child(f"{Keys(self._owner.run).folder}parts/earlier-{identity.nonce()}.jsonl")
            with store_errors(reading=False):
                completes = await self._hands.do(lambda: earlier.completes(kept, order.output, aside))
        return plan_of(
            found,
            source,
            run=self._owner.run,
            nonce=identity.nonce(),
            digest=order.digest,
            endpoint=order.endpoint,
            completes=completes,
            max_error_percent=order.max_error_percent,
        )

    def _find_input(self) -> Source:
        assert self._order.input is not None
        return Source.find(self._order.input)

    async def _refuse_another(self, plan: Plan) -> None:
        """Raise InvalidSpec if the run that is joined by its name is not of the endpoint and the input that were asked for. The output
        is others', and stays so."""
        order, field, value, refusal = self._order, "", "", ""
        given = order.input
        if order.run is None:
            return
        if plan.endpoint != order.endpoint:
            field, value, refusal = "--endpoint", order.endpoint, f"run {plan.run} calls {plan.endpoint}"
        elif (plan.completes is None) != (order.completes is None):
            begun = "--input" if plan.completes is None else "--retry-failed"
            field, value, refusal = "--run-id", plan.run, f"that run was begun with {begun}"
        elif given is not None and not await self._hands.do(lambda: all(_is_of(given, one) for one in plan.inputs)):
            field, value, refusal = "--input", given.uri, f"run {plan.run} is of {', '.join(one.uri for one in plan.inputs[:3])}"
        if refusal:
            self._owner = None
            raise InvalidSpec(refusal, field=field, value=value, hint="give the same, or another --run-id")

    def _source_of(self, plan: Plan) -> Source:
        if self._order.input is not None:
            return Source.of(self._order.input, plan.inputs)
        assert self._order.open_uri is not None
        return Source.opened(plan.inputs, self._order.open_uri)

    def _manifest(self, plan: Plan, output: Assembled, errors: Assembled, states: Sequence[State], outcome: Outcome) -> Manifest:
        assert output.tag is not None
        assert errors.tag is not None
        usage = msgspec.structs.replace(plan.completes.usage) if plan.completes is not None else State().usage
        for state in states:
            usage.add(state.usage)
        kept = plan.completes.lines if plan.completes is not None else 0
        completed, failed = kept + sum(state.completed for state in states), sum(state.failed for state in states)
        assert output.lines == completed, (output.lines, completed)
        assert output.lines + errors.lines == plan.total, (output.lines, errors.lines, plan.total)
        uri = {name: self._order.output.child(name).uri for name in (OUTPUT, ERRORS)}
        return Manifest(
            version=1,
            run=plan.run,
            created_at=_now(),
            endpoint=plan.endpoint,
            input=[InputFile(one.uri, one.tag, one.bytes, one.sha256) for one in plan.inputs],
            output=ResultFile(uri[OUTPUT], output.tag, output.bytes, output.sha256, output.lines),
            errors=ResultFile(uri[ERRORS], errors.tag, errors.bytes, errors.sha256, errors.lines),
            request_counts=RequestCounts(plan.total, completed, failed),
            usage=usage,
            outcome=outcome,
            retry_of=plan.completes.run if plan.completes is not None else None,
        )

    async def _published(self, run: str) -> Owner | None:
        """Say that the run is finished, and remove the parts, which the results now hold, and those of runs that were displaced.
        Plan and states stay: they tell a worker that comes late that all is done. Returns the owner if it is still this run.
        """
        held = await self._do(protocol.read(OWNER))
        owner = Owner.decode(held.body) if held is not None else None
        if owner is None or owner.run != run:
            return None
        await self._do(protocol.release_output(owner, identity.nonce(), finished=True))
        output = self._order.output

        def remove() -> None:
            for name in (run, *owner.previous):
                for info in list(output.store.list(output.child(Keys(name).folder + "parts/").key)):
                    output.store.delete(info.key)

        with contextlib.suppress(StoreError):
            await self._hands.do(remove)
        return owner

    def _taken(self, taken: Taken) -> OutputExists:
        where = self._order.output.child(taken.name).uri
        if taken.finished or taken.run is None:
            whose = f" (of run {taken.run})" if taken.run is not None else ""
            hint = "choose another output, remove it, or allow overwriting (--overwrite)"
            return OutputExists(f"it exists{whose}", value=where, hint=hint)
        if self._owner is not None and taken.run != self._owner.run:
            return OutputExists(
                f"run {taken.run} has taken this output over from run {self._owner.run}; nothing was published",
                value=self._order.output.uri,
            )
        begun = f", begun {taken.started_at}" if taken.started_at else ""
        if taken.holder is None or identity.is_gone(taken.holder):  # it was left, but by another command than this
            return OutputExists(
                f"run {taken.run}{begun} was left here unfinished, and had another input or other options",
                value=self._order.output.uri,
                hint=f"the command that began it goes on with it (as does --run-id {taken.run} with its input), --overwrite replaces it",
            )
        return OutputExists(
            f"run {taken.run}{begun} writes here and has not published yet",
            value=self._order.output.uri,
            hint=f"let it end; or, if it runs no more, go on with it (--run-id {taken.run}) or replace it (--overwrite)",
        )

    async def _do(self, steps: Steps[T]) -> T:
        return await self._hands.do(lambda: self._executor.run(steps))


def _is_of(given: Location, one: InputObject) -> bool:
    """Whether `one`, of a plan, belongs to the input `given`, which may lead to the same storage by another way."""
    if one.uri == given.uri or one.uri.startswith(given.uri.rstrip("/") + "/"):
        return True
    if given.key and one.key != given.key and not one.key.startswith(given.key.rstrip("/") + "/"):
        return False
    return found_again(given.store, one) is not None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
