"""What tests share: the scenario runner, fakes of the host's parts, and builders."""
