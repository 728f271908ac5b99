"""The caching allocator's rules, each on a request whose outcome is known."""

from steplab.estimate.allocator import CachingAllocator

MIB = 2**20


def test_a_request_is_rounded_to_512_bytes_in_a_segment_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)


def test_large_requests_share_segments_of_20_mib_and_huge_ones_have_their_own():
    allocator = CachingAllocator()
    allocator.allocate(5 * MIB)
    allocator.allocate(5 * MIB)
    assert (allocator.allocated, allocator.reserved) == (10 * MIB, 20 * MIB)
    allocator.allocate(31 * MIB)
    assert allocator.reserved == 20 * MIB + 32 * MIB


def test_what_is_left_of_a_large_block_is_kept_up_to_a_mebibyte():
    allocator = CachingAllocator()
    allocator.allocate(31 * MIB)  # of a segment of 32
    assert allocator.allocated == 32 * MIB


def test_a_freed_block_is_used_again_and_merges_with_its_neighbors():
    allocator = CachingAllocator()
    first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
    allocator.release(first)
    allocator.release(second)
    allocator.allocate(19 * MIB)  # the whole segment again
    assert allocator.reserved == 20 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(4 * MIB, stream=0))
    allocator.allocate(4 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
