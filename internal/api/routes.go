package api

import (
	"net/http"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-sandbox/space/internal/sandbox"
)

// table returns the routes of the API, in the order of the documentation.
func (s *Server) table() []*route {
	var all []*route
	for _, list := range [][]*route{s.sandboxRoutes(), s.processRoutes(), s.inputRoutes(), s.contentRoutes(), s.fileRoutes(), s.adminRoutes()} {
		all = append(all, list...)
	}
	return all
}

func (s *Server) sandboxRoutes() []*route {
	return []*route{{
		method: http.MethodPost, path: "/sandboxes", id: "createSandbox", tag: "sandboxes", waits: true, handle: s.createSandbox,
		summary:     "Create a sandbox",
		description: "Answers at once with the sandbox in state creating and the operation that makes it run.",
		body:        bodyJSON, request: CreateSandbox{},
		answers: []answer{{http.StatusCreated, "With Prefer: wait: it runs.", SandboxAccepted{}}, {http.StatusAccepted, "It is being created.", SandboxAccepted{}}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeIdempotencyConflict, sandbox.CodeConflict, sandbox.CodeFailedPrecondition, sandbox.CodeCapacityUnavailable},
	}, {
		method: http.MethodGet, path: "/sandboxes", id: "listSandboxes", tag: "sandboxes", handle: s.listSandboxes,
		summary: "List sandboxes", description: "In order of creation.",
		params: []*huma.Param{limitParam(), cursorParam(), stateParam(),
			textParam("template", "Only sandboxes of this template.", 256, "base"), metadataParam(),
			enumParam("order", "Oldest or newest first.", "asc", "desc")},
		answers: []answer{{http.StatusOK, "A page of sandboxes.", SandboxPage{}}},
	}, {
		method: http.MethodGet, path: "/sandboxes/{id}", id: "getSandbox", tag: "sandboxes", handle: s.getSandbox,
		summary: "Get a sandbox", answers: []answer{{http.StatusOK, "The sandbox.", Sandbox{}}},
		errors: []sandbox.Code{sandbox.CodeNotFound},
	}, {
		method: http.MethodPatch, path: "/sandboxes/{id}", id: "updateSandbox", tag: "sandboxes", handle: s.updateSandbox,
		summary: "Change metadata and lifecycle", description: "Each object given replaces the old one whole.",
		body: bodyJSON, request: UpdateSandbox{}, answers: []answer{{http.StatusOK, "The sandbox as changed.", Sandbox{}}},
		errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeFailedPrecondition, sandbox.CodeConflict},
	}, {
		method: http.MethodDelete, path: "/sandboxes/{id}", id: "deleteSandbox", tag: "sandboxes", waits: true, handle: s.deleteSandbox,
		summary: "Delete a sandbox", description: "Works from every state. A repeat answers the same operation.",
		answers: []answer{{http.StatusOK, "With Prefer: wait: it is gone.", OperationAccepted{}}, {http.StatusAccepted, "It is being deleted.", OperationAccepted{}}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodGet, path: "/operations/{id}", id: "getOperation", tag: "sandboxes", waits: true, handle: s.getOperation,
		summary: "Get an operation", params: []*huma.Param{waitParam("its end")},
		answers: []answer{{http.StatusOK, "The operation.", Operation{}}}, errors: []sandbox.Code{sandbox.CodeNotFound},
	}}
}

const processPath = "/sandboxes/{id}/processes/{pid}"

func (s *Server) processRoutes() []*route {
	return []*route{{
		method: http.MethodPost, path: "/sandboxes/{id}/commands", id: "createCommand", tag: "processes", handle: s.createCommand,
		summary:     "Create a command",
		description: "Makes a process and a session to follow it. By default, reading the session's events starts the process.",
		body:        bodyJSON, request: CreateCommand{}, answers: []answer{{http.StatusCreated, "The process and its session.", CommandCreated{}}},
		errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodGet, path: "/sandboxes/{id}/processes", id: "listProcesses", tag: "processes", handle: s.listProcesses,
		summary: "List processes", params: []*huma.Param{limitParam(), cursorParam()},
		answers: []answer{{http.StatusOK, "A page of processes.", ProcessPage{}}}, errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}, {
		method: http.MethodGet, path: processPath, id: "getProcess", tag: "processes", waits: true, handle: s.getProcess,
		summary: "Get a process", params: []*huma.Param{waitParam("its exit")},
		answers: []answer{{http.StatusOK, "The process.", Process{}}}, errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}, {
		method: http.MethodPost, path: processPath + "/kill", id: "killProcess", tag: "processes", handle: s.killProcess,
		summary: "Kill a process with all its children", description: "Answers after the death was seen, or says that it is pending.",
		answers: []answer{{http.StatusOK, "The process.", KilledProcess{}}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodPost, path: processPath + "/sessions", id: "createSession", tag: "processes", handle: s.createSession,
		summary: "Make another session for a process", answers: []answer{{http.StatusCreated, "The session.", SessionCreated{}}},
		errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodGet, path: processPath + "/output", id: "readOutput", tag: "processes", handle: s.readOutput, binary: true, stream: true,
		summary: "Read journalled output as bytes", description: "Ends at what is written now. Output that was dropped answers 416.",
		params: []*huma.Param{enumParam("stream", "Which output.", "stdout", "stderr", "pty"),
			intParam("from", "Offset of the first byte.", 0, maxExact, 0)},
		answers: []answer{{http.StatusOK, "The bytes.", nil}}, errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}}
}

func (s *Server) inputRoutes() []*route {
	return []*route{{
		method: http.MethodPost, path: processPath + "/signal", id: "signalProcess", tag: "processes", handle: s.signalProcess, session: true,
		summary: "Send a signal", body: bodyJSON, request: SignalProcess{}, answers: []answer{{http.StatusOK, "The process.", Process{}}},
		errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodPost, path: processPath + "/stdin", id: "writeStdin", tag: "processes", handle: s.writeStdin, session: true, stream: true,
		summary: "Write to a process's input",
		description: "Streams the body. With offset, bytes that were taken before are acknowledged and not written again. " +
			"The header Space-Stdin-Offset of any answer tells how many bytes were taken in all. An Idempotency-Key covers the query and the Content-Length.",
		body: bodyInput, params: []*huma.Param{intParam("offset", "Position of the body in the whole input; default: its end.", 0, maxExact, nil), boolParam("close", "Close the input after the body.")},
		answers: []answer{{http.StatusNoContent, "All was taken.", nil}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodPost, path: processPath + "/resize", id: "resizeProcess", tag: "processes", handle: s.resizeProcess, session: true,
		summary: "Set the size of a terminal", body: bodyJSON, request: TerminalSize{}, answers: []answer{{http.StatusNoContent, "Done.", nil}},
		errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}}
}

const contentPath = "/sandboxes/{id}/files/content"

func (s *Server) contentRoutes() []*route {
	return []*route{{
		method: http.MethodGet, path: contentPath, id: "getFileContent", tag: "files", handle: s.getContent, binary: true, stream: true,
		summary: "Read a file", description: "Streamed. One range of bytes can be asked for with Range. HEAD answers the headers.",
		params:  []*huma.Param{pathParam(), userParam()},
		answers: []answer{{http.StatusOK, "The bytes.", nil}, {http.StatusPartialContent, "The bytes of the range.", nil}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}, {
		method: http.MethodPut, path: contentPath, id: "putFileContent", tag: "files", handle: s.putContent, stream: true,
		summary: "Write a file",
		description: "Streamed. A regular file appears whole or not at all: an upload that is cut changes nothing. An Idempotency-Key " +
			"covers the query and the Content-Length, not the bytes, which are never kept; a repeat writes the file again.",
		body: bodyBytes, params: []*huma.Param{pathParam(), userParam(), modeParam(), boolParam("parents", "Make missing parent folders.")},
		answers: []answer{{http.StatusOK, "The file.", Entry{}}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict, sandbox.CodeFailedPrecondition},
	}, {
		method: http.MethodDelete, path: contentPath, id: "deleteFile", tag: "files", handle: s.deleteContent,
		summary: "Remove a file or folder", params: []*huma.Param{pathParam(), userParam(), boolParam("recursive", "Remove a folder with all it holds.")},
		answers: []answer{{http.StatusNoContent, "It is gone.", nil}},
		errors:  []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict, sandbox.CodeFailedPrecondition},
	}}
}

func (s *Server) fileRoutes() []*route {
	change := []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict, sandbox.CodeIdempotencyConflict, sandbox.CodeFailedPrecondition}
	return []*route{{
		method: http.MethodGet, path: "/sandboxes/{id}/files", id: "listFiles", tag: "files", handle: s.listFiles,
		summary: "List a folder",
		params:  []*huma.Param{pathParam(), userParam(), intParam("depth", "How many levels to list; 1 is the folder itself.", 1, 64, 1), limitParam(), cursorParam()},
		answers: []answer{{http.StatusOK, "A page of entries.", EntryPage{}}}, errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}, {
		method: http.MethodGet, path: "/sandboxes/{id}/files/stat", id: "statFile", tag: "files", handle: s.statFile,
		summary: "Describe a file", params: []*huma.Param{pathParam(), userParam(), boolParam("follow", "Describe what a link points to.")},
		answers: []answer{{http.StatusOK, "The entry.", Entry{}}}, errors: []sandbox.Code{sandbox.CodeNotFound, sandbox.CodeConflict},
	}, {
		method: http.MethodPost, path: "/sandboxes/{id}/files/mkdir", id: "makeDirectory", tag: "files", handle: s.makeDirectory,
		summary: "Make a folder", body: bodyJSON, request: MakeDirectory{}, answers: []answer{{http.StatusOK, "The folder.", Entry{}}}, errors: change,
	}, {
		method: http.MethodPost, path: "/sandboxes/{id}/files/move", id: "moveFile", tag: "files", handle: s.moveFile,
		summary: "Move or rename", body: bodyJSON, request: MoveFile{}, answers: []answer{{http.StatusOK, "The entry at its new path.", Entry{}}}, errors: change,
	}, {
		method: http.MethodPost, path: "/sandboxes/{id}/files/copy", id: "copyFile", tag: "files", handle: s.copyFile,
		summary: "Copy", body: bodyJSON, request: CopyFile{}, answers: []answer{{http.StatusOK, "The copy.", Entry{}}}, errors: change,
	}}
}

func (s *Server) adminRoutes() []*route {
	return []*route{{
		method: http.MethodGet, path: "/templates", id: "listTemplates", tag: "templates", handle: s.listTemplates,
		summary: "List templates", answers: []answer{{http.StatusOK, "All templates.", TemplatePage{}}},
	}, {
		method: http.MethodGet, path: "/templates/{name}", id: "getTemplate", tag: "templates", handle: s.getTemplate,
		summary: "Get a template", answers: []answer{{http.StatusOK, "The template.", Template{}}}, errors: []sandbox.Code{sandbox.CodeNotFound},
	}, {
		method: http.MethodPost, path: "/api-keys", id: "createAPIKey", tag: "api-keys", handle: s.createKey,
		summary: "Make an API key", description: "The key itself is in this answer and nowhere else.",
		body: bodyJSON, request: CreateKey{}, answers: []answer{{http.StatusCreated, "The key.", NewKey{}}},
		errors: []sandbox.Code{sandbox.CodeConflict, sandbox.CodeIdempotencyConflict},
	}, {
		method: http.MethodGet, path: "/api-keys", id: "listAPIKeys", tag: "api-keys", handle: s.listKeys,
		summary: "List API keys", params: []*huma.Param{limitParam(), cursorParam()},
		answers: []answer{{http.StatusOK, "A page of keys.", KeyPage{}}},
	}, {
		method: http.MethodDelete, path: "/api-keys/{id}", id: "revokeAPIKey", tag: "api-keys", handle: s.revokeKey,
		summary: "Revoke an API key", description: "Ends its streams within 5 seconds.",
		answers: []answer{{http.StatusOK, "The key's record.", KeyRecord{}}}, errors: []sandbox.Code{sandbox.CodeNotFound},
	}}
}

// upcoming returns the routes that are planned but not there yet. They authenticate like any route and are not in
// the document, so that clients neither mistake them for typos nor build on them.
func upcoming() []*route {
	var out []*route
	for _, u := range []struct{ methods, path, instead string }{
		{"POST", "/sandboxes/{id}/pause", "leave the sandbox running, or delete it and create another"},
		{"POST", "/sandboxes/{id}/suspend", "leave the sandbox running, or delete it and create another"},
		{"POST", "/sandboxes/{id}/wake", "nothing suspends a sandbox yet: create another if this one does not run"},
		{"POST", "/sandboxes/{id}/fork", "create further sandboxes from the same template"},
		{"POST", "/sandboxes/{id}/snapshots", "keep what you need by reading it through the files routes"},
		{"POST", "/sandboxes/{id}/rollback", "create a fresh sandbox from the same template"},
		{"GET", "/snapshots", "keep what you need by reading it through the files routes"},
		{"GET DELETE", "/snapshots/{id}", "keep what you need by reading it through the files routes"},
		{"GET PUT", "/sandboxes/{id}/network", "sandboxes have no network access outside of the API for now"},
		{"GET", "/sandboxes/{id}/network/events", "sandboxes have no network access outside of the API for now"},
		{"POST", "/network/evaluate", "sandboxes have no network access outside of the API for now"},
		{"GET", "/sandboxes/{id}/files/watch", "list the folder with GET files"},
		{"GET PUT", "/sandboxes/{id}/files/archive", "run tar as a command and move its file through files/content"},
		{"GET", "/sandboxes/{id}/metrics", "read /proc in the sandbox with a command"},
		{"GET", "/sandboxes/{id}/logs", "read a process's output"},
		{"GET POST", "/volumes", "write files through the files routes"},
		{"GET DELETE", "/volumes/{id}", "write files through the files routes"},
		{"GET POST", "/webhooks", "wait with GET /operations/{id}?wait=60"},
		{"GET DELETE", "/webhooks/{id}", "wait with GET /operations/{id}?wait=60"},
		{"GET POST", "/credentials", "give secrets to single commands in env"},
		{"PUT DELETE", "/credentials/{id}", "give secrets to single commands in env"},
		{"GET", "/audit", "read the server's log"},
		{"GET", "/nodes", "GET /sandboxes names the node of each sandbox"},
		{"GET", "/nodes/{id}", "GET /sandboxes names the node of each sandbox"},
		{"GET POST", "/projects", "use the default project"},
		{"GET DELETE", "/projects/{id}", "use the default project"},
		{"GET", "/metrics", "read the server's log"},
		{"GET", "/logs", "read a process's output"},
		{"POST", "/templates", "use a template that is there: GET /templates"},
		{"GET POST", "/templates/{name}/builds", "use a template that is there: GET /templates"},
		{"GET", "/templates/{name}/builds/{id}", "use a template that is there: GET /templates"},
		{"GET", "/templates/{name}/builds/{id}/logs", "use a template that is there: GET /templates"},
		{"GET POST", "/templates/{name}/tags", "use a template that is there: GET /templates"},
	} {
		for _, method := range strings.Fields(u.methods) {
			out = append(out, &route{method: method, path: u.path, later: true, stream: true, handle: func(*call) error {
				return sandbox.Errorf(sandbox.CodeFailedPrecondition, "this route is not available yet").WithRemediation(u.instead)
			}})
		}
	}
	return out
}
