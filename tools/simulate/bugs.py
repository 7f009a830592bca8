"""The planted bugs, each of which some seed must find."""

from __future__ import annotations

from tools.simulate.patching import Bug

_WINDOW = "aioshm.queue.remote.window"
_PLACES = "aioshm.queue.remote.places"
_AUDIENCE = "aioshm.queue.remote.audience"
_LINK = "aioshm.queue.remote.link"
_TRACKER = "aioshm.events.protocol.tracker"
_NUMBERING = "aioshm.events.protocol.numbering"
_OUTBOX = "aioshm.events.protocol.outbox"
_REPLAY = "aioshm.events.protocol.replay_buffer"
_RESTART = "aioshm.process.restart"
_RESTARTING = "aioshm.engine.startup.restarting"
_HANDSHAKE = "aioshm.engine.protocol.handshake"
_WAVES = "aioshm.engine.protocol.waves"
_LOCKSTEP = "aioshm.engine.protocol.lockstep"
_PENDING = "aioshm.engine.client.pending"
_BALANCE = "aioshm.engine.protocol.balance"
_PREDICTOR = "aioshm.wait.predictor"

BUGS = (
    Bug(
        "gaps",
        _WINDOW,
        "            self._early[seq] = message, nbytes\n",
        "            self.ready.append((message, nbytes))\n",
        "what lies behind a gap is delivered before it",
    ),
    Bug(
        "fastest",
        _WINDOW,
        "        needed = min(self.readers.values(), default=self.seq)\n        free",
        "        needed = max(self.readers.values(), default=self.seq)\n        free",
        "what the fastest reader has is let go of",
    ),
    Bug(
        "asked-once",
        _WINDOW,
        "        self._asked = self.next\n",
        "        pass\n",
        "what was asked for in vain is not asked for again",
    ),
    Bug(
        "marks",
        _WINDOW,
        "        self._known = max(self._known, seq)\n        self.ask_again()",
        "        self.ask_again()",
        "nobody asks for what came while a connection was down",
    ),
    Bug(
        "sent-again",
        _WINDOW,
        "        self._again[rank] = set()\n",
        "        pass\n",
        "what was sent again over a connection that broke is not sent once more",
    ),
    Bug(
        "counted-on",
        _WINDOW,
        "        self.readers.pop(rank, None)\n        self._again",
        "        self._again",
        "the window waits for a reader that is gone",
    ),
    Bug(
        "history",
        _WINDOW,
        "self.seq - min(history, len(self._kept))",
        "max(0, self.seq - history)",
        "a newcomer is promised history that is not kept",
    ),
    Bug(
        "room",
        _WINDOW,
        "len(self._kept) + messages <= self._max_messages and",
        "len(self._kept) <= self._max_messages and",
        "the window holds a message too many",
    ),
    Bug(
        "skipped",
        _WINDOW,
        "last = message.last + 1 if isinstance(message, Missing) else last + 1",
        "last = last + 1",
        "a reader that skips counts what it has lost wrong",
    ),
    Bug(
        "heirs",
        _PLACES,
        "first = window.readers[rank] if heir else window.join(rank, hello.history)",
        "first = window.join(rank, hello.history)",
        "what was held for a replacement is not given to it",
    ),
    Bug(
        "leavers",
        _PLACES,
        '        if state != "held":\n            self._leave',
        '        if state == "died":\n            self._leave',
        "the window waits for a reader that has left",
    ),
    Bug(
        "two-in-one",
        _PLACES,
        "if place.peer is None and self.elsewhere(place.rank) is None:",
        "if self.elsewhere(place.rank) is None:",
        "two readers have one place",
    ),
    Bug(
        "raised-on",
        _PLACES,
        "        place.extra, place.trouble = True, None\n",
        "        place.extra = True\n",
        "a death is raised after the reader was dismissed",
    ),
    Bug(
        "known-dead",
        _PLACES,
        "        del self._by_identity[peer.identity]\n",
        "        pass\n",
        "a dead reader is still counted on",
    ),
    Bug(
        "silence",
        _AUDIENCE,
        "if now - silent_since >= self._timeout:",
        "if now - silent_since >= 100 * self._timeout:",
        "a dead reader is never noticed",
    ),
    Bug(
        "unwatched",
        _AUDIENCE,
        "        if self._timer is None:\n            self._tick()\n",
        "",
        "nobody looks whether readers live",
    ),
    Bug(
        "finished",
        _AUDIENCE,
        "                peer.finished = True\n",
        "",
        "the writer waits for readers that have everything",
    ),
    Bug(
        "unmarked",
        _AUDIENCE,
        "_mark(self._secret, rank, self.flow.window.seq)",
        "_mark(self._secret, rank, 0)",
        "a reader is not told what it has missed",
    ),
    Bug(
        "reconnection",
        _LINK,
        "        self.window.ask_again()\n",
        "",
        "what was asked for over a connection that broke is never asked for again",
    ),
    Bug(
        "wake-up",
        _LINK,
        "        if self.window.ready:\n            self._gate.wake()",
        "        if len(self.window.ready) == 1:\n            self._gate.wake()",
        "a reader is not woken where several messages come at once",
    ),
    Bug(
        "proof",
        _LINK,
        "                    self._tell(wire.Proven())\n",
        "                    pass\n",
        "the writer does not learn that data reaches a reader",
    ),
    Bug(
        "proof-again",
        _LINK,
        "            if self.writer.proven:  #",
        "            if False:  #",
        "a writer that has forgotten a reader meanwhile does not learn that data reaches it",
    ),
    Bug(
        "fingerprints",
        _NUMBERING,
        "        age = self.expected - seq\n",
        "        age = self.expected - seq + 1\n",
        "a copy is taken for another publisher's",
    ),
    Bug(
        "last-hole",
        _OUTBOX,
        "if self.last_sent == self.published - 1:",
        "if True:",
        "nobody learns of the last batches that were dropped",
    ),
    Bug(
        "numbers",
        _OUTBOX,
        "                self._has_no_room(seq)\n",
        "                self._has_no_room(seq)\n                return False\n",
        "a dropped batch leaves no hole",
    ),
    Bug(
        "sleeper",
        _OUTBOX,
        "                self._wake_at = 1\n                return None",
        "                self._wake_at = 2\n                return None",
        "a batch waits until another one is published",
    ),
    Bug(
        "replay-begin",
        _REPLAY,
        "begin = max(skip, bisect_left(chunks[0], start, key=_number))",
        "begin = bisect_left(chunks[0], start, key=_number)",
        "a replay has more than the buffer may",
    ),
    Bug(
        "replay-size",
        _REPLAY,
        "skip = max(0, self._count - self._size)",
        "skip = max(0, self._count - self._size + 1)",
        "a replay lacks the oldest batch",
    ),
    Bug(
        "one-restart",
        _RESTART,
        "if before >= policy.max_restarts:",
        "if before > policy.max_restarts:",
        "a crash loop goes on for one restart more",
    ),
    Bug(
        "backoff",
        _RESTART,
        "return min(policy.backoff_s * 2.0**doublings, policy.backoff_max_s)",
        "return 0.0",
        "a crash loop takes all of a CPU",
    ),
    Bug(
        "expected",
        _RESTARTING,
        "        self._rejoining.expect(rank)\n        life.turn",
        "        life.turn",
        "an engine that is started again is not let in",
    ),
    Bug(
        "hanging",
        _RESTARTING,
        "            life.doomed = True\n            process.kill()\n",
        "            life.doomed = True\n",
        "an engine that never gets ready is waited for, for ever",
    ),
    Bug(
        "twice",
        _RESTARTING,
        "if self.failure is not None or life.settle(found):",
        "if self.failure is not None:",
        "an engine that dies while it starts is started twice",
    ),
    Bug(
        "relapse",
        _RESTARTING,
        "                self._relapse = life, found\n"
        "                self._kill_processes()  # the others may wait for it\n",
        "                pass\n",
        "an engine that dies while others of its group start stays dead",
    ),
    Bug(
        "late-lives",
        _TRACKER,
        "elif job.answered and ended and verdict in (Verdict.GAP, Verdict.NEXT):",
        "elif job.answered and ended and verdict is Verdict.GAP:",
        "what a dead publisher had sent is taken for its successor's",
    ),
    Bug(
        "old-lives",
        _TRACKER,
        "elif job.same and verdict is Verdict.BACK:",
        "elif False:",
        "what a dead publisher had sent is taken for another restart",
    ),
    Bug(
        "first-lives",
        _TRACKER,
        "            stream.doubted = True\n        stream.numbers.accept(",
        "            pass\n        stream.numbers.accept(",
        "what comes after a replay is taken for its publisher's",
    ),
    Bug(
        "forgotten",
        _HANDSHAKE,
        "        self.engines[index].state = CoreEngineState.NEW\n",
        "",
        "an engine's successor cannot shake hands",
    ),
    Bug(
        "ready",
        _HANDSHAKE,
        "        engine.state = CoreEngineState.READY\n",
        "",
        "an engine that is ready may say so again",
    ),
    Bug(
        "new-wave",
        _WAVES,
        "wave < self.wave or (wave == self.wave and self.running):",
        "wave <= self.wave:",
        "engines are not woken for a new wave",
    ),
    Bug(
        "silent-start",
        _LOCKSTEP,
        "        self.running = True\n        return self.wave",
        "        self.running = True\n        return None",
        "an engine runs alone, and waits for the others",
    ),
    Bug(
        "woken",
        _LOCKSTEP,
        "start.wave >= self.wave",
        "start.wave > self.wave",
        "an engine does not join the wave that begins",
    ),
    Bug(
        "paused",
        _LOCKSTEP,
        "        self.wave += 1\n",
        "",
        "a wave that is over has the number of the next one",
    ),
    Bug(
        "balance",
        _PENDING,
        "        self._balance.done(inbox.position)\n        inbox.end(error)",
        "        inbox.end(error)",
        "an engine seems to have requests for ever",
    ),
    Bug(
        "unfinished",
        _PENDING,
        "            if is_finished(output):\n                self.finish(request_id)\n",
        "",
        "a request that was answered does not end",
    ),
    Bug(
        "double",
        _PENDING,
        "            inbox.put(output)\n",
        "            inbox.put(output)\n            inbox.put(output)\n",
        "each output comes twice",
    ),
    Bug(
        "left-out",
        _BALANCE,
        "            self.choices.remove(position)",
        "            pass",
        "a dead engine gets requests",
    ),
    Bug(
        "failures",
        _PREDICTOR,
        "self._failures = 0 if hit else self._failures + 1",
        "self._failures = 0",
        "spins go on however often they were in vain",
    ),
)
