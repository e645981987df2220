package qmp

import (
	"encoding/json"
	"fmt"
)

// message is any line of QEMU: the greeting, an answer or an event.
type message struct {
	Greeting *greeting       `json:"QMP"`
	Event    string          `json:"event"`
	Data     json.RawMessage `json:"data"`
	ID       *uint64         `json:"id"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

type greeting struct {
	Version struct {
		QEMU struct {
			Major int `json:"major"`
			Minor int `json:"minor"`
			Micro int `json:"micro"`
		} `json:"qemu"`
		Package string `json:"package"`
	} `json:"version"`
}

// parse reads one line. Raw parts are copies, so the line's buffer may be used again.
func parse(line []byte) (message, error) {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return message{}, fmt.Errorf("qmp line of %d bytes: %w", len(line), err)
	}
	return m, nil
}

// decode turns an answer into the command's result.
func (m message) decode(command string, result any) error {
	if m.Error != nil {
		return &Error{Command: command, Class: m.Error.Class, Desc: m.Error.Desc}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(m.Return, result); err != nil {
		return fmt.Errorf("qmp %s: result: %w", command, err)
	}
	return nil
}
