/* A lifeline: connecting, being admitted, ready, goodbye; and every way of ending in between.
 *
 * One writer, one reader. Either may close on purpose at any moment, or be killed before any step.
 *
 *     step here      lifeline/
 *     dial           dialer.py dial, hang_up
 *     await answer   dialer.py attach
 *     attached       dialer.py Lifeline._readable, _signals; source.py RingSource._writer_gone
 *     accept         listener.py LifelineListener._accept
 *     greet          listener.py Peer._greet
 *     admit          listener.py Peer._find_place, _has_gone, _admit: later iterations of the loop
 *     signals        listener.py Peer._read_some, _signals; readers.py LocalReaders.attached, proven, gone, missed
 *     close          listener.py LifelineListener.close, _turn_away; listener.py Peer.close
 *
 * Properties: a reader takes a writer that has closed for closed, and one that was killed for dead, or finds nobody
 * listening; a writer takes a reader that said goodbye for one that left, and one that was killed for dead; every place is
 * vacant once its reader is gone; nobody waits for ever.
 */
mtype = { HELLO, PROVEN, BYE, WELCOME, CLOSED, GO };
chan up = [4] of { mtype };
chan down = [4] of { mtype };
bit listening = 1, waiting, up_end, down_end, kill_w, kill_r, closed_flag, left_on_purpose, taken, over_w;

bit leaves, closes;        /* each may close on purpose from now on */

/* One of them ends in some way, at any moment, and the other one perhaps as well. */
active proctype killer() {
    if :: kill_w = 1 :: kill_r = 1 :: leaves = 1 :: closes = 1 fi;
    if :: kill_w = 1 :: kill_r = 1 :: leaves = 1 :: closes = 1 :: skip fi
}

active proctype reader() {
    {

    if                                                            /* dial */
    :: atomic { listening -> waiting = 1 }; up!HELLO
    :: !listening -> goto over
    fi;
    do                                                            /* await answer */
    :: down?WELCOME -> break
    :: down?CLOSED -> assert(closed_flag); goto over
    :: down_end && empty(down) -> assert(kill_w); goto over       /* PeerDied */ /* -NO_END_READER */
    :: leaves -> left_on_purpose = 1; up!BYE; goto over           /* cancelled: hang_up */
    od;
    up!PROVEN;
    do                                                            /* attached */
    :: down?GO
    :: down?BYE -> assert(closed_flag); goto over
    :: down_end && empty(down) -> assert(kill_w); goto over                      /* -NO_END_READER */
    :: leaves -> left_on_purpose = 1;
        up!BYE;                                                                  /* -NO_GOODBYE */
        goto over
    od
    } unless { kill_r };
over:
    up_end = 1
}

active proctype writer() {
    bit accepted, greeted, admitted, settled, bye;
    {
    do
    :: !accepted && waiting -> accepted = 1; waiting = 0          /* accept */
    :: accepted && !greeted && up?[HELLO] -> up?HELLO; greeted = 1    /* greet */
    :: greeted && !admitted && !bye ->                            /* admit */
        if
        :: up?[BYE] -> up?BYE; bye = 1                            /* missed */
        :: !up?[BYE] -> admitted = 1; taken = 1; down!WELCOME
        fi
    :: !accepted && !waiting && up_end -> goto ended              /* nobody comes any more */
    :: admitted && up?[PROVEN] -> up?PROVEN; settled = 1; down!GO
    :: admitted && up?[BYE] -> up?BYE; bye = 1
    :: accepted && up_end && empty(up) ->                         /* gone */     /* -NO_END_WRITER */
        assert(!admitted || bye == left_on_purpose || kill_r);                   /* -NO_END_WRITER */
        assert(!bye || left_on_purpose);                                         /* -NO_END_WRITER */
        taken = 0; goto ended                                                    /* -NO_END_WRITER */
    :: closes ->                                                  /* close */
        closed_flag = 1;
        if
        :: admitted -> down!BYE
        :: accepted && !admitted -> down!CLOSED                                  /* -NO_CLOSED_TO_STRANGERS */
        /* +NO_CLOSED_TO_STRANGERS: :: accepted && !admitted */
        :: !accepted
        fi;
        listening = 0;                                                           /* -NO_SHUTDOWN */
        if                                                                       /* -NO_TURN_AWAY */
        :: waiting -> waiting = 0; down!CLOSED                                   /* -NO_TURN_AWAY */
        :: !waiting                                                              /* -NO_TURN_AWAY */
        fi;                                                                      /* -NO_TURN_AWAY */
        listening = 0;
        down_end = 1; taken = 0;
        goto ended
    od
    } unless { kill_w };
ended:
    atomic { listening = 0; down_end = 1; over_w = 1; if :: kill_w -> taken = 0 :: else fi };
    up_end;
    assert(!taken)
}
