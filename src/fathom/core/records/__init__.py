"""What crosses a process or a disk: trajectories, rewards, demonstrations; and the rows made from them."""
