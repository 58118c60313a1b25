# Added to the end of SPIRE Server's own policy.rego: who is named in the data may read agents, and do nothing else.

allow if {
    input.caller == data.agent_readers[_]
    input.full_method == data.agent_read_methods[_]
}
