"""Calls inside a region whose results are kept, so that a replay does not run them.

A kept call is one of a torch function, or of a module. What is kept of it: its results, and of the tensors that autograd saved
inside it those that are neither its arguments, nor views or casts of them, nor parameters. So a replay that comes to the call has
everything at hand that the call would have saved, hands it to the pack hook in the order of the forward, and returns the results.
No autograd node is made for that, and no dispatch mode is needed.

How a call goes through its three runs:

- The audited one (``_sites``) sees every call of a function, by a function mode, and of a module, by hooks. Nothing is kept yet. When
  it is over the policy is asked about each (``_learned``).
- Forwards from then on (``_forward``) find the kept calls by function, or module, and the number of calls before. Functions are found
  by a function mode, about a microsecond for each call that it looks at; modules by an attribute ``forward`` that stands in
  for the method of the class while the region runs (``_modules``). ``_origins`` says where what autograd saves comes from.
- Replays (``_replaying``) find them in the same way. A replay goes the way of its forward, so the n-th call of a function there is
  the n-th one here, whatever audits have learned. Where anything is not as it was (a result that was written to, other shapes, a result
  that was let go of), the call is simply run.
"""
