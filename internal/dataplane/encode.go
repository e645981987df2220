package dataplane

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"time"

	agentv1 "github.com/space-sandbox/space/internal/gen/space/agent/v1"
	nodev1 "github.com/space-sandbox/space/internal/gen/space/node/v1"
)

const timeFormat = "2006-01-02T15:04:05.000Z"

// streamName is the name of a stream's events; a stream without one is not passed on.
func streamName(s agentv1.Stream) string {
	switch s {
	case agentv1.Stream_STREAM_STDOUT:
		return "stdout"
	case agentv1.Stream_STREAM_STDERR:
		return "stderr"
	case agentv1.Stream_STREAM_PTY:
		return "pty"
	}
	return ""
}

// appendEvent appends ev in the form of server-sent events. Output is written by hand into the buffer that is reused:
// it is nearly all that a stream carries. Unknown kinds append nothing.
func appendEvent(buf []byte, process string, ev *nodev1.Event) []byte {
	switch kind := ev.GetKind().(type) {
	case *nodev1.Event_Output:
		return appendOutput(buf, ev.GetId(), kind.Output)
	case *nodev1.Event_Started:
		return appendJSON(buf, ev.GetId(), "started", startedJSON{process, kind.Started.GetOsPid(), stamp(kind.Started.GetAt().AsTime())})
	case *nodev1.Event_Exited:
		return appendJSON(buf, ev.GetId(), "process_exited", exitedOf(kind.Exited))
	case *nodev1.Event_Dropped:
		d := kind.Dropped
		return appendJSON(buf, ev.GetId(), "output_dropped", droppedJSON{streamName(d.GetStream()), d.GetFromOffset(), d.GetToOffset()})
	case *nodev1.Event_Interrupted:
		i := kind.Interrupted
		return appendJSON(buf, ev.GetId(), "interrupted", interruptedJSON{i.GetReason(), i.GetRetryable(), i.GetRetryAfterS()})
	case *nodev1.Event_Resync:
		return appendJSON(buf, ev.GetId(), "resync_required", resyncJSON{kind.Resync.GetFirstAvailableId(), kind.Resync.GetDroppedEvents()})
	}
	return buf
}

// appendOutput appends one event; the guest's frames are at most 32 KiB by contract, and an event cannot be split because its
// number stands for all of it.
func appendOutput(buf []byte, id uint64, out *nodev1.OutputChunk) []byte {
	name := streamName(out.GetStream())
	if name == "" {
		return buf
	}
	buf = appendHead(buf, id, name)
	buf = append(buf, `{"data":"`...)
	buf = base64.StdEncoding.AppendEncode(buf, out.GetData())
	buf = append(buf, `","offset":`...)
	buf = strconv.AppendUint(buf, out.GetOffset(), 10)
	return append(buf, "}\n\n"...)
}

func appendHead(buf []byte, id uint64, name string) []byte {
	if id != 0 {
		buf = append(buf, "id: "...)
		buf = strconv.AppendUint(buf, id, 10)
		buf = append(buf, '\n')
	}
	buf = append(buf, "event: "...)
	buf = append(buf, name...)
	return append(buf, "\ndata: "...)
}

func appendJSON(buf []byte, id uint64, name string, v any) []byte {
	data, err := json.Marshal(v)
	if err != nil { // our own types always encode
		return buf
	}
	buf = appendHead(buf, id, name)
	buf = append(buf, data...)
	return append(buf, "\n\n"...)
}

func stamp(t time.Time) string { return t.UTC().Format(timeFormat) }

type startedJSON struct {
	ProcessID string `json:"process_id"`
	OSPID     int32  `json:"os_pid"`
	StartedAt string `json:"started_at"`
}

type exitedJSON struct {
	Code         *int32  `json:"code"`
	Signal       *string `json:"signal"`
	TimedOut     bool    `json:"timed_out"`
	OOMKilled    bool    `json:"oom_killed"`
	CoreDumped   bool    `json:"core_dumped"`
	ExitedAt     string  `json:"exited_at"`
	StdoutBytes  uint64  `json:"stdout_bytes"`
	StderrBytes  uint64  `json:"stderr_bytes"`
	DroppedBytes uint64  `json:"dropped_bytes"`
}

func exitedOf(e *nodev1.ProcessExited) exitedJSON {
	x := e.GetExit()
	out := exitedJSON{
		TimedOut: x.GetTimedOut(), OOMKilled: x.GetOomKilled(), CoreDumped: x.GetCoreDumped(), ExitedAt: stamp(x.GetAt().AsTime()),
		StdoutBytes: e.GetStdoutBytes(), StderrBytes: e.GetStderrBytes(), DroppedBytes: e.GetDroppedBytes(),
	}
	if x != nil {
		out.Code = x.Code
	}
	if s := x.GetSignal(); s != "" {
		out.Signal = &s
	}
	return out
}

type droppedJSON struct {
	Stream     string `json:"stream"`
	FromOffset uint64 `json:"from_offset"`
	ToOffset   uint64 `json:"to_offset"`
}

type interruptedJSON struct {
	Reason      string `json:"reason"`
	Retryable   bool   `json:"retryable"`
	RetryAfterS uint32 `json:"retry_after_s"`
}

type resyncJSON struct {
	FirstAvailableID uint64 `json:"first_available_id"`
	DroppedEvents    uint64 `json:"dropped_events"`
}
