// Package bench measures a running server through its API, as its clients see it, and next to it the floor: what the
// VMM alone needs for the same thing on the same machine at the same time (package floor). A figure's samples and its
// floor's alternate, so that other load on the machine meets both; the ratio of their medians is what the platform adds.
//
//   - create to running: the floor restores a VM from the same snapshot, lets it run and gets one answer of its agent.
//   - create to first command done: that, the guest's identity and a bare run of the command.
//   - exec round trip, output, many files: the floor runs the same command over the control link, acknowledges its
//     output and throws it away. The agent is part of both; what comes on top are journal, node, API and client.
//   - file up and down: the floor moves the same bytes by the agent's file service over the control link.
//   - memory: the floor is the PSS of such a VM's VMM, without a shim.
//   - API reads have no floor.
//
// Run owns the sandboxes and VMs it makes and deletes them; it starts no server. A figure holds every sample, so that
// percentiles are exact. Samples are taken one after the other: what is measured is the time of one, not the throughput
// of many. What moves much data is measured less often; every figure says in n how often.
package bench
