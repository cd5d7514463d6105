"""A head that learns from what the server answers: collected texts, versions of the head, and the learner."""
