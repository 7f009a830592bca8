/* Delivery to a remote reader: numbers, acknowledgements, marks and asking again, over connections that are cut.
 *
 * One writer, one reader, M messages, a window of W. Data comes over one connection, control messages pass over another;
 * each may be cut at any moment, with all that is under way, CUTS times. Either process may die.
 *
 *     step here      queue/remote/window.py                              queue/remote/
 *     send           SendWindow.room, sent                               readers.py RemoteReaders.publish
 *     subscribed     SendWindow.connected                                readers.py RemoteReaders.subscribed
 *     resend         SendWindow.resend                                   RemoteReaders._handle
 *     acknowledge    SendWindow.acknowledged; ReceiveWindow.finished     source.py NetworkSource._acknowledge
 *     arrived        ReceiveWindow.expects, arrived                      NetworkSource.receive_data
 *     marked         ReceiveWindow.marked, ask_again
 *     ask            ReceiveWindow.to_ask_for                            NetworkSource._ask_for_missing
 *     introduce                                                          NetworkSource._introduce
 *
 * That a connection is down, or the other end dead, is found out in the end: by remote_timeout (RemoteReader.heard, _tick,
 * _check_writer). A writer that restarts has another topic and another window: it refuses its predecessor's reader, which takes
 * the predecessor for dead, which is what dying is here.
 *
 * Properties: each message once, in order; what was acknowledged was read; no more than two windows are on their way; no
 * deadlock, so nothing is lost and nobody waits for the dead.
 */
#define M 4
#define W 2
#define CUTS 2
mtype = { DATA, MARK, ACK, RESEND };
chan data = [2 * W + 1] of { mtype, byte };
chan control = [4] of { mtype, byte };
bit data_up, control_up, kill_w, kill_r, dead_w, dead_r;
byte cuts, acked;

active proctype network() {
    do
    :: cuts < CUTS && data_up -> d_step { cuts++; data_up = 0;
        do :: nempty(data) -> data?_,_ :: empty(data) -> break od }
    :: cuts < CUTS && control_up -> d_step { cuts++; control_up = 0;
        do :: nempty(control) -> control?_,_ :: empty(control) -> break od }
    :: break
    od;
    if :: kill_w = 1 :: kill_r = 1 :: skip fi
}
active proctype writer() {
    byte seq, first, resent; bit subscribed;
    {
    do
    :: seq < M && seq - acked < W ->                          /* send */
        atomic { if :: data_up && subscribed -> assert(nfull(data)); data!DATA,seq :: else fi; seq++ }
    :: !data_up -> atomic {                                   /* subscribed, over a new connection */
        data_up = 1; subscribed = 1;
        resent = 0;                                                              /* -NO_AGAIN_RESET */
        data!MARK,seq                                                            /* -NO_MARK */
        }
    :: control?ACK,first -> atomic {                          /* acknowledge */
        assert(first <= seq);
        if :: first > acked -> acked = first :: else fi; first = 0 }
    :: control?RESEND,first -> atomic {                       /* resend */
        assert(first < seq);
        if
        :: first < resent -> skip                                                /* -NO_BOUND */
        :: first >= resent ->                                                    /* -NO_BOUND */
        /* +NO_BOUND: :: true -> */
            resent = seq;
            if :: first < acked -> first = acked :: else fi;
            do
            :: first < seq ->
                if :: data_up -> assert(nfull(data)); data!DATA,first :: else fi;
                first++
            :: else -> break
            od
        fi; first = 0 }
    :: acked == M || dead_r -> break
    od
    } unless { kill_w };
    if :: kill_w -> dead_w = 1 :: else fi
}
active proctype reader() {
    byte next, known, asked, taken, told, s;
    {
    do
    :: data?DATA,s -> atomic {                                /* arrived */
        if
        :: s == next -> next++
        :: s > next ->                                                           /* -NO_ORDER */
            if :: s >= known -> known = s + 1 :: else fi                         /* -NO_ORDER */
        :: s < next -> skip                                                      /* -NO_ORDER */
        /* +NO_ORDER: :: s != next -> assert(s == next) */
        fi; s = 0 }
    :: data?MARK,s -> atomic {                                /* marked */
        if :: s > known -> known = s :: else fi;
        asked = next;                                                            /* -NO_ASK_AGAIN */
        s = 0 }
    :: control_up && asked <= next && next < known && nfull(control) -> atomic {   /* ask */
        control!RESEND,next; asked = known }
    :: taken < next -> taken++                                /* read */
    :: control_up && told < taken && nfull(control) -> atomic { control!ACK,taken; told = taken }
    :: !control_up -> atomic { control_up = 1;                /* introduce */
        asked = next; told = 0                                                   /* -NO_INTRODUCE */
        }
    :: dead_w && empty(data) -> break
    :: taken == M && acked == M -> break
    od
    } unless { kill_r };
    if :: kill_r -> dead_r = 1 :: else fi
}
