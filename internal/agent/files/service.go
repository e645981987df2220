package files

import (
	"github.com/space-sandbox/space/internal/agent/users"
	"github.com/space-sandbox/space/internal/gen/space/agent/v1/agentv1connect"
)

// Service implements space.agent.v1.FileService.
type Service struct {
	agentv1connect.UnimplementedFileServiceHandler
	users   *users.DB
	streams chan struct{} // one token for each open stream
}

// maxStreams bounds the open Read and Write streams.
const maxStreams = 64

// New returns the service for the users of db.
func New(db *users.DB) *Service {
	return &Service{users: db, streams: make(chan struct{}, maxStreams)}
}
