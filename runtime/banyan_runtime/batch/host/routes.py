"""The HTTP of files and batches, as the server's front passes it on. Keys, request ids and OpenAI's error object are the front's."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from banyan_runtime.batch.host.batches import Batches
from banyan_runtime.batch.host.content import span
from banyan_runtime.batch.host.documents import BatchDocument, FileDocument
from banyan_runtime.batch.host.files import Files, Incoming
from banyan_runtime.batch.host.keeper import Keeper
from banyan_runtime.batch.host.multipart import Form, read_form
from banyan_runtime.batch.host.refusals import AGAIN_S, Refusal, invalid, no_such_file, storage_away, storage_full, too_large
from banyan_runtime.batch.host.requests import file_expiry, file_purpose, new_batch, page
from banyan_runtime.batch.host.shelf import Storage
from banyan_runtime.storage.store import StoreError

log = logging.getLogger("banyan")

FORM_BYTES: Final = 64 << 10  # what a form has around its file
BODY_BYTES: Final = 256 << 10  # of a new batch: 16 pairs of metadata
HEAD_LINE_BYTES: Final = 16 << 10  # of a request's head; the front takes no longer ones
SEND_BYTES: Final = 256 << 10
CLIENT_CLOSED: Final = 499
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of a file in general, and of one that is a batch's input."""

    file_bytes: int
    batch_bytes: int

    def of(self, purpose: str | None) -> int:
        return self.batch_bytes if purpose == "batch" else self.file_bytes


LIMITS: Final = Limits(file_bytes=512 << 20, batch_bytes=200 << 20)


class Routes:
    """The handlers."""

    def __init__(self, storage: Storage, files: Files, batches: Batches, keeper: Keeper, limits: Limits, endpoints: Sequence[str]) -> None:
        self._storage = storage
        self._files = files
        self._batches = batches
        self._keeper = keeper
        self._limits = limits
        self._endpoints = endpoints

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_refusals], client_max_size=BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/files", self.create_file),
                web.get("/v1/files", self.list_files),
                web.get("/v1/files/{id}", self.get_file),
                web.get("/v1/files/{id}/content", self.get_content),
                web.delete("/v1/files/{id}", self.delete_file),
                web.post("/v1/batches", self.create_batch),
                web.get("/v1/batches", self.list_batches),
                web.get("/v1/batches/{id}", self.get_batch),
                web.post("/v1/batches/{id}/cancel", self.cancel_batch),
                web.get("/stats", self.stats),
            ]
        )
        return app

    async def create_file(self, request: web.Request) -> web.StreamResponse:
        length = request.content_length or 0
        if length > self._limits.file_bytes + FORM_BYTES:
            raise too_large(self._limits.file_bytes)
        free = self._storage.reserve.free
        if free is not None and length > free:
            raise storage_full()
        incoming: Incoming | None = None

        async def take(block: bytes, form: Form) -> None:
            nonlocal incoming
            if incoming is None:
                incoming = await self._files.receive()
            await incoming.write(block, self._limits.of(form.fields.get("purpose")))

        try:
            form = await read_form(request, take)
            purpose = file_purpose(form.fields)
            expires_after = file_expiry(form.fields, purpose)
            incoming = incoming or await self._files.receive()
            if incoming.size > self._limits.of(purpose):
                raise too_large(self._limits.of(purpose))
            assert form.filename is not None
            document = await self._files.keep(incoming, form.filename, purpose, expires_after)
        except BaseException:
            if incoming is not None:
                await incoming.abort()
            raise
        return _json(document.public())

    async def list_files(self, request: web.Request) -> web.StreamResponse:
        wanted = page(request.query, default=10_000, most=10_000)
        return _list(*await self._files.listed(wanted, request.query.get("purpose") or None))

    async def get_file(self, request: web.Request) -> web.StreamResponse:
        return _json((await self._files.get(request.match_info["id"])).public())

    async def get_content(self, request: web.Request) -> web.StreamResponse:
        document, reader = await self._files.open(request.match_info["id"])
        try:
            asked = span(request.headers.get("Range"), reader.size)
            headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
            if asked is None:
                return web.Response(status=416, headers=headers | {"Content-Range": f"bytes */{reader.size}"})
            if not asked.whole:
                headers["Content-Range"] = f"bytes {asked.start}-{asked.end - 1}/{reader.size}"
            response = web.StreamResponse(status=200 if asked.whole else 206, headers=headers)
            response.content_length = asked.end - asked.start
            await response.prepare(request)
            at = asked.start
            while at < asked.end:
                try:
                    block = await self._storage.call(reader.read, at, min(at + SEND_BYTES, asked.end))
                except StoreError as failed:
                    raise _broken_off(request, f"file {document.id} cannot be read on: {failed}") from failed
                if not block:
                    raise _broken_off(request, f"file {document.id} is shorter than it was")
                await response.write(block)
                at += len(block)
            await response.write_eof()
            return response
        finally:
            reader.close()

    async def delete_file(self, request: web.Request) -> web.StreamResponse:
        identity = request.match_info["id"]
        await self._files.delete(identity)
        return _json({"id": identity, "object": "file", "deleted": True})

    async def create_batch(self, request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read())
        except web.HTTPRequestEntityTooLarge:
            message = f"The body of a new batch is larger than {BODY_BYTES} bytes; its requests belong into the input file."
            raise Refusal(413, message, code="request_too_large", param="body") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refusal(400, f"We could not parse the JSON body of your request: {error}") from None
        new = new_batch(body, self._endpoints)
        key = request.headers.get("Idempotency-Key") or None
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        batch = await self._batches.repeated(new, key=key, again=again)
        if batch is None:
            batch = await self._batches.create(new, await self._input(new.input_file_id), key=key)
            self._keeper.seek()
        return _json(batch.public())

    async def _input(self, identity: str) -> str:
        """The key of the bytes of a batch's input. Raises Refusal."""
        try:
            source = await self._files.get(identity)
        except Refusal:
            raise invalid("input_file_id", no_such_file(identity).message) from None
        if source.purpose != "batch":
            raise invalid("input_file_id", f"The file's purpose is '{source.purpose}'; a batch's input is uploaded with purpose 'batch'.")
        return source.content

    async def list_batches(self, request: web.Request) -> web.StreamResponse:
        found, more = await self._batches.listed(page(request.query, default=20, most=100))
        return _list([self._keeper.live(batch) for batch in found], more)

    async def get_batch(self, request: web.Request) -> web.StreamResponse:
        held = await self._batches.get(request.match_info["id"])
        return _json(self._keeper.live(held.document).public())

    async def cancel_batch(self, request: web.Request) -> web.StreamResponse:
        batch = await self._batches.cancel(request.match_info["id"])
        self._keeper.kick(batch.id)
        return _json(self._keeper.live(batch).public())

    async def stats(self, request: web.Request) -> web.StreamResponse:
        return _json({"batches": self._keeper.statuses, "storage_full": self._keeper.storage_full})


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What handlers raise, as a status and three fields of which the front makes the error object."""
    try:
        return await handler(request)
    except Refusal as refusal:
        error = refusal
    except StoreError as failed:
        log.warning("%s %s: %s", request.method, request.path, failed)
        error = storage_away(failed)
    except web.HTTPException as refused:
        error = Refusal(refused.status, refused.reason)
    except ConnectionError as gone:
        log.debug("%s %s: nobody waits for the answer any more: %s", request.method, request.path, gone)
        return web.Response(status=CLIENT_CLOSED)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        error = Refusal(500, "Internal server error", code="internal_error")
    headers = {"Retry-After": str(AGAIN_S)} if error.status == 503 else {}
    return _json({"message": error.message, "code": error.code, "param": error.param}, error.status, headers)


def _broken_off(request: web.Request, why: str) -> ConnectionError:
    """End the connection in the middle of an answer: nothing else tells that what was sent is not all."""
    log.warning("%s %s: %s", request.method, request.path, why)
    if request.transport is not None:
        request.transport.abort()
    return ConnectionError(why)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json")


def _list(found: list[FileDocument] | list[BatchDocument], more: bool) -> web.Response:
    data = [each.public() for each in found]
    ids = [each.id for each in found]
    return _json(
        {"object": "list", "data": data, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": more}
    )
