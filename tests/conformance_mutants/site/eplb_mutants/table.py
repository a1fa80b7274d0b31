"""Every mutant: where it is, what it does wrong, and the kit test that is meant to catch it. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """A faulty backend.

    Parameters
    ----------
    module : str
        Of this package.
    test : str
        Name of the kit test meant for it, without ``test_``.
    fault : str
        What it does wrong.
    declares : dict
        Fields of BackendInfo that differ from the good backend's.
    """

    module: str
    test: str
    fault: str
    declares: dict = field(default_factory=dict)


def class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


MUTANTS = {
    # what it declares
    "heavy_hooks": Mutant("declared", "the_declaration_is_light", "its hook module imports torch"),
    "unknown_device": Mutant(
        "declared",
        "the_declaration_is_sound",
        "declares a device type torch has not",
        {"device_types": ("cpu", "gpu")},
    ),
    "undecorated": Mutant("declared", "the_class_is_whole", "overrides a hook without @hookimpl"),
    "no_abort": Mutant("declared", "the_class_is_whole", "has no abort"),
    "fails_when_built": Mutant("declared", "a_communicator_can_be_built", "raises in register_buffers"),
    "loose_options": Mutant(
        "declared", "unknown_options_are_refused", "takes any option", {"options": "eplb_mutants.declared:Loose"}
    ),
    "options_of_its_own": Mutant("declared", "equal_ranks_fit_together", "shared_options differ from rank to rank"),
    "addresses_of_rows": Mutant("declared", "metadata_is_small", "lists the address of every row"),
    "accepts_anything": Mutant("declared", "foreign_metadata_is_refused", "believes foreign metadata"),
    "pickles": Mutant("declared", "nothing_is_pickled", "pickles its metadata"),
    # bytes
    "short_copy": Mutant("moved", "a_row_arrives_whole", "leaves out the last byte of a row"),
    "wrong_row": Mutant("moved", "rows_go_where_the_plan_says", "reads rows in the reverse order"),
    "wrong_layer": Mutant("moved", "layers_are_not_confused", "sends rows of the next layer"),
    "swapped_tensors": Mutant("moved", "tensors_are_not_confused", "sends the tensors in reverse order"),
    "converts_dtype": Mutant("moved", "bits_travel_unread", "moves floats as numbers"),
    "skips_scalars": Mutant("moved", "scalar_and_empty_rows_travel", "leaves out rows below 8 bytes"),
    "forgets_empty_tensors": Mutant("moved", "scalar_and_empty_rows_travel", "does not count tensors of 0 bytes"),
    "serves_one_peer": Mutant("moved", "one_row_serves_several_peers", "sends a row to one of its receivers"),
    "expects_every_slot": Mutant(
        "moved", "empty_slots_and_duplicates_are_placements", "lands row n at place n, whatever the plan says"
    ),
    "merges_sources": Mutant("moved", "any_shuffle_arrives", "takes equal row numbers of two sources for one row"),
    "cuts_large_rows": Mutant("moved", "many_rows_and_large_ones_travel", "moves 1 MiB of a row at most"),
    "cuts_long_lists": Mutant("moved", "many_rows_and_large_ones_travel", "moves 1024 rows at most"),
    "counts_its_own_moves": Mutant("moved", "a_rank_without_moves_keeps_step", "counts only the transfers it moves in"),
    "empty_receipts": Mutant("moved", "receipts_count_the_bytes", "says that nothing was moved"),
    "ignores_own_landing": Mutant(
        "moved", "the_hosts_landing_rows_are_used", "never looks at landing_rows", {"landing_layout": "rows"}
    ),
    "counts_from_a_base": Mutant(
        "moved", "experts_that_lie_apart_are_moved", "takes every expert of a list for the first one"
    ),
    "keeps_old_rows": Mutant("moved", "rows_travel_as_they_are_now", "sends the rows of the first generation again"),
    "shares_files": Mutant("moved", "communicators_of_one_process_are_apart", "keeps its peers' files per process"),
    "remembers_addresses": Mutant("moved", "a_new_communicator_starts_from_nothing", "keeps addresses over its end"),
    # order
    "transfer_waits": Mutant("timed", "transfer_does_not_wait", "waits within transfer"),
    "no_handle": Mutant("timed", "transfer_does_not_wait", "returns None as its handle"),
    "returns_early": Mutant("timed", "wait_returns_with_the_rows", "does not wait for the source"),
    "one_landing_slot": Mutant("timed", "two_layers_in_flight_keep_their_slots", "lands every layer in slot 0"),
    "lands_in_live_rows": Mutant("timed", "live_rows_are_never_written", "writes live rows before the vote"),
    "writes_the_plan": Mutant("timed", "the_plan_is_left_alone", "sorts a column of the plan in place"),
    "lands_again": Mutant("timed", "nothing_happens_after_wait", "writes landing memory after wait"),
    "reads_after_wait": Mutant("timed", "nothing_happens_after_wait", "reads live rows after wait, as after a commit"),
    "slow_progress": Mutant("timed", "progress_does_not_wait", "sleeps in progress"),
    # failures
    "ignores_its_limit": Mutant("failing", "wait_keeps_its_limit", "ignores timeout_s"),
    "swallows_errors": Mutant("failing", "wait_never_swallows_a_failure", "returns a receipt after an error"),
    "swallows_in_wait": Mutant(
        "failing", "wait_never_swallows_a_failure", "goes on after the limit with whatever lies there"
    ),
    "swallows_cancelled": Mutant(
        "failing", "wait_never_swallows_a_failure", "goes on after a cancellation with whatever lies there"
    ),
    "bare_errors": Mutant("failing", "failures_are_typed", "raises TimeoutError"),
    "ignores_cancelled": Mutant("failing", "wait_ends_when_a_peer_gives_up", "never asks context.cancelled()"),
    "stays_broken": Mutant("failing", "an_abort_costs_no_weight", "says drained and fails from then on"),
    "drains_in_name": Mutant("failing", "abort_drains_what_it_says", "says drained while a thread goes on"),
    "slow_abort": Mutant("failing", "abort_drains_what_it_says", "takes three seconds to abort"),
    "counts_on_absent_ranks": Mutant("failing", "a_dead_rank_is_survived", "waits for ranks that are no members"),
    "hangs_on_close": Mutant("failing", "a_forced_close_is_prompt", "closes after four seconds"),
    "forgets_earlier_peers": Mutant("failing", "later_peers_are_added", "replaces its peers by the new ones"),
    # lives
    "named_too_early": Mutant("living", "epoch_and_store_come_with_the_meeting", "keeps the epoch it is built with"),
    "greets_too_early": Mutant(
        "living", "epoch_and_store_come_with_the_meeting", "sets a key of the store in register_buffers"
    ),
    "copies_its_context": Mutant("living", "epoch_and_store_come_with_the_meeting", "copies the context when built"),
    "counts_its_transfers": Mutant("living", "only_the_plan_is_counted", "numbers transfers as it starts them"),
    "follows_the_last_sequence": Mutant("living", "only_the_plan_is_counted", "names a transfer by the one before it"),
    "closes_in_name": Mutant("living", "close_knows_what_abort_left", "says safe while a thread goes on"),
    "forgets_what_it_aborted": Mutant(
        "living", "close_knows_what_abort_left", "looks at close for transfers in flight, not for those abort left"
    ),
    "searches_cancelled": Mutant("living", "cancelled_is_no_text", "looks for a word in cancelled()"),
    "wants_a_rank_in_the_text": Mutant("living", "cancelled_is_no_text", "obeys a reason that names a rank, no other"),
    "goes_on_with_the_lost": Mutant("living", "cancelled_is_no_text", "goes on with a peer that is lost"),
    # growth
    "leaks_descriptors": Mutant("growing", "descriptors_do_not_grow", "opens a file per round"),
    "leaks_threads": Mutant("growing", "threads_do_not_grow", "starts a thread per round that never ends"),
    "leaks_handles": Mutant("growing", "memory_does_not_grow", "keeps every handle, and 1 MiB with it"),
    "leaks_store_keys": Mutant("growing", "store_keys_do_not_grow", "sets a key per round"),
    "starts_processes": Mutant("growing", "no_process_is_started", "starts a process"),
    "sets_environment": Mutant("growing", "the_environment_is_left_alone", "sets an environment variable"),
    "leaves_files_open": Mutant("growing", "close_returns_everything", "closes nothing"),
    "stages_everything": Mutant("growing", "staging_is_bounded", "keeps staging memory for every layer"),
    # claims
    "bound_to_a_thread": Mutant(
        "claiming", "async_safe_a_worker_thread_may_transfer", "works on the thread that built it alone"
    ),
    "changes_torch": Mutant("claiming", "async_safe_a_worker_thread_may_transfer", "changes torch's default dtype"),
    "holds_the_interpreter": Mutant("claiming", "async_safe_the_engine_goes_on", "waits while it holds the GIL"),
    "claims_zero_copy": Mutant(
        "claiming", "zero_copy_takes_no_memory_for_rows", "stages, and claims zero_copy", {"zero_copy": True}
    ),
    "reads_too_early": Mutant(
        "claiming", "zero_copy_the_source_stays_frozen", "reads live rows at registration", {"zero_copy": True}
    ),
    "knows_the_first_ranks": Mutant("claiming", "elastic_safe_a_rank_may_join_late", "refuses ranks it met later"),
    "first_batch_only": Mutant("claiming", "batched_every_batch_is_moved", "moves batch 0 alone", {"batched": True}),
}
