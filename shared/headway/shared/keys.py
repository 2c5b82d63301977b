"""Every Redis key, each a function; the shard is the hash tag, so that a script's keys share one cluster slot."""

from dataclasses import dataclass

from headway.shared.job import TIERS, shard_of

#: The consumer group of every lane stream.
GROUP = "headway"

#: The stream of a lane that is read first: jobs that come back.
RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class Keys:
    """The key names under one prefix."""

    prefix: str

    def _of(self, shard: str, *parts: str) -> str:
        return ":".join((self.prefix, "{" + shard + "}", *parts))

    def job(self, job_id: str) -> str:
        """Hash: the job's record."""
        return self._of(shard_of(job_id), "job", job_id)

    def body(self, job_id: str) -> str:
        """String: the request body, the bytes that came in."""
        return self._of(shard_of(job_id), "body", job_id)

    def log(self, job_id: str) -> str:
        """Stream: the reply channel's durable half; the id of entry n is `n-0`."""
        return self._of(shard_of(job_id), "log", job_id)

    def result(self, job_id: str) -> str:
        """String: the JSON body of the final answer or error."""
        return self._of(shard_of(job_id), "result", job_id)

    def notice(self, job_id: str) -> str:
        """Pub/Sub channel: the reply channel's quick half; a message has the new replies, or only their last offset."""
        return self._of(shard_of(job_id), "notice", job_id)

    def cancels(self, shard: str) -> str:
        """Pub/Sub channel: ids of running jobs that somebody has cancelled; every worker listens."""
        return self._of(shard, "cancels")

    def lanes(self, shard: str) -> str:
        """Set: the `<model>:<lane>` of every lane that ever had a job."""
        return self._of(shard, "lanes")

    def lane(self, shard: str, model: str, lane: str, tier: str) -> str:
        """Stream: the waiting and running jobs of one lane and tier, read by the consumer group."""
        return self._of(shard, "lane", model, lane, tier)

    def lane_streams(self, shard: str, model: str, lane: str) -> tuple[str, ...]:
        """The streams of a lane in the order in which they are read."""
        return tuple(self.lane(shard, model, lane, tier) for tier in (RETURNED, *TIERS))

    def parse_lane(self, stream: str) -> tuple[str, str, str]:
        """Model, lane and tier of a lane stream."""
        named, lane, tier = stream.rsplit(":", 2)
        return named.split(":lane:", 1)[1], lane, tier

    def returned(self, stream: str) -> str:
        """Stream: where the jobs of a lane stream come back to, the lane's own `returned`."""
        return stream.rsplit(":", 1)[0] + ":" + RETURNED

    def backlog(self, shard: str) -> str:
        """Hash: the prompt tokens that are queued in each lane stream."""
        return self._of(shard, "backlog")

    def events(self, shard: str) -> str:
        """Stream, capped: lifecycle events; written only while somebody has created it."""
        return self._of(shard, "events")
